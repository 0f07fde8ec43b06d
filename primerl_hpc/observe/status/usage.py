"""Node-hours and GPU-hours of a run over all its attempts, from SLURM's accounting or else from the run's events.

Reading order: `run.ledger.attempts` → `usage_from_events`, `Accounting`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.run.ledger.attempts import Attempt
from primerl_hpc.slurm.command_lines import SEPARATOR, accounting_command, is_of
from primerl_hpc.slurm.commands import ask
from primerl_hpc.slurm.jobs import epoch_s

_FIELDS = "JobIDRaw,JobID,State,ElapsedRaw,NNodes,AllocTRES,Start"
SLACK_S = 3600.0
"""Differences between the clocks and time zones of machines; records that are further away are of other jobs."""


@dataclass(frozen=True)
class Usage:
    attempts: int
    node_hours: float
    gpu_hours: float | None
    """None if the nodes have no GPUs."""
    source: Literal["sacct", "events"]

    @property
    def sentence(self) -> str:
        gpus = f"{self.gpu_hours:.2f} GPU-hours, " if self.gpu_hours is not None else ""
        attempts = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        return f"{gpus}{self.node_hours:.2f} node-hours in {attempts}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def usage_from_events(attempts: list[Attempt], nodes: int, gpus_per_node: float, now: float) -> Usage:
    """Return the usage if every attempt occupied all its nodes from start to end."""
    ends = (attempt.end if attempt.end is not None else now for attempt in attempts)
    hours = sum(end - attempt.start for end, attempt in zip(ends, attempts, strict=True)) / 3600
    gpu_hours = hours * nodes * gpus_per_node if gpus_per_node else None
    return Usage(len(attempts), hours * nodes, gpu_hours, "events")


class Accounting:
    """The usage of a run's jobs from sacct, requeues included.

    sacct is queried once per attempt; between queries the hours of a running job grow with the clock.
    """

    def __init__(
        self, ask: Callable[[list[str]], str] = ask, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask, self._clock = ask, clock
        self._last_query: tuple[Any, float] | None = None
        self._rows: list[JobUsage] = []

    def usage(
        self, attempts: list[Attempt], gpus_per_node: float, engines: str | None = None
    ) -> Usage | None:
        """Return the usage, or None if no attempt was a SLURM job or sacct does not respond.

        ``engines`` is the id of the job of elastic engines.
        """
        jobs = sorted({attempt.job for attempt in attempts if attempt.job})
        if not jobs:
            return None
        query = (jobs, engines, len(attempts), attempts[-1].end is None)
        if self._last_query is None or self._last_query[0] != query:
            self._last_query = (query, self._clock())
            try:
                rows = parse_usage(self._ask(usage_command([*jobs, *([engines] if engines else [])])))
            except SchedulerError:
                rows = []
            self._rows = [
                row
                for row in rows
                if row.belongs_to(jobs, engines) and row.started_between(attempts[0].start, attempts[-1].end)
            ]
        if not self._rows:
            return None
        return self._sum(len(attempts), gpus_per_node, self._clock() - self._last_query[1])

    def _sum(self, attempts: int, gpus_per_node: float, since_s: float) -> Usage:
        node_s = gpu_s = 0.0
        for row in self._rows:
            seconds = row.elapsed_s + (since_s if row.is_running else 0.0)
            node_s += seconds * row.nodes
            gpu_s += seconds * (row.gpus if row.gpus is not None else gpus_per_node * row.nodes)
        has_gpus = gpus_per_node or any(row.gpus for row in self._rows)
        return Usage(attempts, node_s / 3600, gpu_s / 3600 if has_gpus else None, "sacct")


@dataclass(frozen=True)
class JobUsage:
    """One accounting record of a job. A requeued job has several, and so has a number that was given to another job:
    numbers count from the start after their limit, and on a new cluster."""

    number: str
    listed: str
    is_running: bool
    elapsed_s: float
    nodes: int
    gpus: int | None
    """GPUs of all nodes; None if the site does not account for GPUs."""
    start: float | None
    """Seconds since the epoch; None if it did not start."""

    def belongs_to(self, jobs: Sequence[str], engines: str | None) -> bool:
        """True for a record of ``jobs``, or of a task of the array ``engines``; not for other tasks of their arrays."""
        return any(is_of(job, self.number, self.listed) for job in jobs) or (
            self.listed.partition("_")[0] == engines
        )

    def started_between(self, first: float, last: float | None) -> bool:
        """``last`` None: until now."""
        if self.start is None:
            return True
        return self.start >= first - SLACK_S and (last is None or self.start <= last + SLACK_S)


def usage_command(jobs: list[str]) -> list[str]:
    """Return the sacct command for all records of ``jobs``."""
    listing = (
        "--allocations",
        "--duplicates",
        "--parsable2",
        f"--delimiter={SEPARATOR}",
        f"--format={_FIELDS}",
    )
    return accounting_command(jobs, *listing)


def parse_usage(text: str) -> list[JobUsage]:
    """Parse the output of `usage_command`. Records without nodes are ignored."""
    rows = []
    for line in text.splitlines():
        fields = line.strip(" ").split(SEPARATOR)
        if len(fields) != 7 or not (fields[3].isdigit() and fields[4].isdigit()):
            continue
        number, listed, state, seconds, nodes, resources, start = fields
        gpus = re.search(r"(?:^|,)gres/gpu=(\d+)", resources)
        if resources:
            count = int(gpus[1]) if gpus else None
            time_s = epoch_s(start)
            rows.append(
                JobUsage(number, listed, state == "RUNNING", float(seconds), int(nodes), count, time_s)
            )
    return rows
