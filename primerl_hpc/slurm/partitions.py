"""Limits of the site's partitions, as sinfo reports them: what a job exceeds, and the partition that admits it.

    excess = find_excess([{"partition": "gpu", "nodes": "64", "time": "2-00:00:00"}], ask_partitions())
    excess.what         # partition gpu admits at most 1-00:00:00 and 32 nodes, and the job requests …
    excess.remedy       # partition long admits this job: --partition long

A QOS may lift the limits of its partition, so only SLURM's refusal is final. Without ``EnforcePartLimits`` SLURM
accepts such a job, which then waits in the queue without an end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.slurm.command_lines import partitions_command
from primerl_hpc.slurm.commands import ask
from primerl_hpc.slurm.jobs import SEPARATOR, minutes

FIELDS = SEPARATOR.join(("%P", "%a", "%l", "%s", "%D", "%G"))
QUERY_S = 5.0
"""Time limit of the query: it only explains."""


@dataclass(frozen=True)
class Partition:
    name: str
    is_up: bool
    time: str
    """Longest walltime in SLURM's notation; ``infinite`` without a limit."""
    most_nodes: float
    """Largest number of nodes of a job: the limit, or all nodes of the partition."""
    is_default: bool = False
    has_gpus: bool = False

    def admits(self, num_nodes: int, time: str | None) -> bool:
        return self.is_up and num_nodes <= self.most_nodes and self._admits_time(time)

    def _admits_time(self, time: str | None) -> bool:
        requested, longest = minutes(time), minutes(self.time)
        return requested is None or longest is None or requested <= longest

    @property
    def limits(self) -> str:
        times = [self.time] if minutes(self.time) is not None else []
        return " and ".join([*times, f"{self.most_nodes:.0f} nodes"])


@dataclass(frozen=True)
class Excess:
    """A request that no partition of the job admits."""

    what: str
    remedy: str


def ask_partitions() -> list[Partition]:
    """Return the partitions that sinfo shows; none if it does not answer or the site hides them."""
    try:
        return parse_partitions(ask(partitions_command(FIELDS), QUERY_S))
    except SchedulerError:
        return []


def parse_partitions(text: str) -> list[Partition]:
    """Return the partitions from the lines of sinfo, which prints one for each kind of nodes."""
    rows = [row for line in text.splitlines() if len(row := line.strip(" ").split(SEPARATOR)) == 6]
    found = {}
    for name in dict.fromkeys(row[0] for row in rows):
        own = [row for row in rows if row[0] == name]
        _, state, time, size, _, _ = own[0]
        most = size.rpartition("-")[2]  # "1-infinite", "4"
        limit = int(most) if most.isdigit() else math.inf
        num_nodes = sum(int(count) for *_, count, _ in own)
        has_gpus = any("gpu" in gres for *_, gres in own)
        plain = name.removesuffix("*")
        found[plain] = Partition(
            plain, state == "up", time, min(limit, num_nodes), name.endswith("*"), has_gpus
        )
    return list(found.values())


def find_excess(
    components: Sequence[Mapping[str, str | None]], partitions: Sequence[Partition]
) -> Excess | None:
    """Return what the first component of a job that does not fit exceeds; None if all fit, or are not known.

    ``components``: sbatch options of each component; one element for an ordinary job.
    """
    for number, options in enumerate(components, start=1):
        excess = _excess_of(options, partitions, number if len(components) > 1 else None)
        if excess is not None:
            return excess
    return None


def _excess_of(
    options: Mapping[str, str | None], partitions: Sequence[Partition], component: int | None
) -> Excess | None:
    wanted = (options.get("partition") or "").split(",")
    own = [item for item in partitions if item.name in wanted or (wanted == [""] and item.is_default)]
    nodes, time = options.get("nodes") or "1", options.get("time")
    if not own or not nodes.isdigit() or any(item.admits(int(nodes), time) for item in own if item.is_up):
        return None
    if not any(item.is_up for item in own):
        return None  # it is down: SLURM's own message explains that
    limits = "; ".join(f"partition {item.name} admits at most {item.limits}" for item in own)
    requested = f"{nodes} node{'s' * (nodes != '1')}" + (f" for {time}" if time else "")
    part = "the job" if component is None else f"component {component} of the job"
    fitting = _fitting(partitions, own, int(nodes), time)
    if not fitting:
        return Excess(f"{limits}, and {part} requests {requested}", _smaller(own, int(nodes)))
    key = "--partition" if component is None else "set its partition in node_types or cpu_partition to"
    others = f" (also {', '.join(fitting[1:])})" if fitting[1:] else ""
    remedy = f"partition {fitting[0]} admits {'this job' if component is None else 'it'}: {key} {fitting[0]}"
    return Excess(f"{limits}, and {part} requests {requested}", remedy + others)


def _fitting(
    partitions: Sequence[Partition], own: Sequence[Partition], num_nodes: int, time: str | None
) -> list[str]:
    """Return the names of other partitions that admit the request."""
    needs_gpus = any(item.has_gpus for item in own)
    return [
        item.name
        for item in partitions
        if item not in own and item.admits(num_nodes, time) and item.has_gpus >= needs_gpus
    ]


def _smaller(own: Sequence[Partition], num_nodes: int) -> str:
    """Return how to change a request that no partition admits."""
    with_nodes = [item for item in own if item.admits(num_nodes, None)]
    if with_nodes:
        longest = max(with_nodes, key=lambda item: minutes(item.time) or math.inf)
        return f"lower scheduler.time to {longest.time} (--time), and continue with --chain or requeue"
    return "no partition admits so many nodes for this time: request fewer nodes, or a shorter --time"
