"""Node-hours and GPU-hours of a run over all its attempts: as SLURM accounts for them, else by the run's own clock."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.common.files import read_jsonl
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.slurm import SEPARATOR, ask

_FIELDS = "JobID,State,ElapsedRaw,NNodes,AllocTRES"


@dataclass(frozen=True)
class Attempt:
    """One life of the run in the queue, from its events."""

    number: int
    job: str | None
    start: float
    end: float | None
    """None: it goes on."""
    resumed_from: int = 0


@dataclass(frozen=True)
class Usage:
    attempts: int
    node_hours: float
    gpu_hours: float | None
    """None on nodes without GPUs."""
    source: Literal["sacct", "events"]

    @property
    def sentence(self) -> str:
        gpus = f"{self.gpu_hours:.2f} GPU-hours, " if self.gpu_hours is not None else ""
        lives = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        return f"{gpus}{self.node_hours:.2f} node-hours in {lives}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def attempts_of(
    events: Iterable[dict[str, Any]], *, is_running: bool, seen: Mapping[int, float] | None = None
) -> list[Attempt]:
    """An attempt ends with its last event, or last sign of life (``seen``, by attempt): one that was killed says nothing.

    The last one goes on when ``is_running``.
    """
    seen = seen or {}
    attempts: list[Attempt] = []
    is_over = False
    for event in events:
        time = float(event["time"])
        if event["event"] == "attempt_started":
            number = int(event["attempt"])
            end, is_over = max(time, seen.get(number, time)), False
            attempts.append(Attempt(number, event.get("job"), time, end))
        elif attempts and not is_over:
            # another job's, which does nothing, and may come much later
            is_over = event["event"] == "link_idle"
            is_phase = event["event"] == "phase_started"
            last = attempts[-1]
            assert last.end is not None
            attempts[-1] = replace(
                last,
                end=last.end if is_over else max(last.end, time),
                resumed_from=int(event.get("resumed_from") or 0) if is_phase else last.resumed_from,
            )
    if attempts and is_running:
        attempts[-1] = replace(attempts[-1], end=None)
    return attempts


def last_signs(run: RunDir, attempt: int) -> dict[int, float]:
    """By attempt: when its last step was finished; of ``attempt``, the last one, also when its supervisor last showed itself."""
    seen: dict[int, float] = {}
    for role in ("sft", "trainer"):
        for row in read_jsonl(run.metrics(role)):
            number, time = row.get("attempt"), row.get("time")
            if isinstance(number, int) and isinstance(time, int | float):
                seen[number] = max(time, seen.get(number, 0.0))
    with contextlib.suppress(OSError):
        seen[attempt] = max(run.supervisor_lock.stat().st_mtime, seen.get(attempt, 0.0))
    return seen


def own_usage(attempts: list[Attempt], nodes: int, gpus_per_node: int, now: float) -> Usage:
    hours = sum((each.end if each.end is not None else now) - each.start for each in attempts) / 3600
    gpu_hours = hours * nodes * gpus_per_node if gpus_per_node else None
    return Usage(len(attempts), hours * nodes, gpu_hours, "events")


class Accounting:
    """What sacct tells of a run's jobs, requeues included. Asked once per attempt, not per look: a running job's hours
    grow by the clock."""

    def __init__(
        self, ask: Callable[[list[str]], str] = ask, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask, self._clock = ask, clock
        self._asked: tuple[Any, float] | None = None
        self._rows: list[JobUse] = []

    def usage(self, attempts: list[Attempt], gpus_per_node: int, engines: str | None = None) -> Usage | None:
        """``engines``: the job of elastic engines. None when none of the attempts was a SLURM job, and where sacct does not answer."""
        jobs = sorted({each.job for each in attempts if each.job})
        if not jobs:
            return None
        jobs += [engines] if engines else []
        what = (jobs, len(attempts), attempts[-1].end is None)
        if self._asked is None or self._asked[0] != what:
            self._asked = (what, self._clock())
            try:
                self._rows = parse_use(self._ask(use_command(jobs)))
            except SchedulerError:
                self._rows = []
        if not self._rows:
            return None
        return self._sum(len(attempts), gpus_per_node, self._clock() - self._asked[1])

    def _sum(self, attempts: int, gpus_per_node: int, since_s: float) -> Usage:
        node_s = gpu_s = 0.0
        for row in self._rows:
            seconds = row.elapsed_s + (since_s if row.is_running else 0.0)
            node_s += seconds * row.nodes
            gpu_s += seconds * (row.gpus if row.gpus is not None else gpus_per_node * row.nodes)
        has_gpus = gpus_per_node or any(row.gpus for row in self._rows)
        return Usage(attempts, node_s / 3600, gpu_s / 3600 if has_gpus else None, "sacct")


@dataclass(frozen=True)
class JobUse:
    """One life of a job in accounting."""

    is_running: bool
    elapsed_s: float
    nodes: int
    gpus: int | None
    """Of all nodes together; None where the site does not account for GPUs."""


def use_command(jobs: list[str]) -> list[str]:
    listing = [
        "sacct",
        "--noheader",
        "--allocations",
        "--duplicates",
        "--parsable2",
        f"--delimiter={SEPARATOR}",
    ]
    return [*listing, f"--jobs={','.join(jobs)}", f"--format={_FIELDS}"]


def parse_use(text: str) -> list[JobUse]:
    """Lives that never got a node count nothing."""
    rows = []
    for line in text.splitlines():
        fields = line.strip(" ").split(SEPARATOR)
        if len(fields) != 5 or not (fields[2].isdigit() and fields[3].isdigit()):
            continue
        gpus = re.search(r"(?:^|,)gres/gpu=(\d+)", fields[4])
        seconds = float(fields[2])
        if fields[4]:
            rows.append(
                JobUse(fields[1] == "RUNNING", seconds, int(fields[3]), int(gpus[1]) if gpus else None)
            )
    return rows
