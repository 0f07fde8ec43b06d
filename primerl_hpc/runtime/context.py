"""State that the parts of a supervisor share: the run, its plan, the journal, the clock of the job, requests to stop.

context = RunContext(run_dir, plan, attempt, journal, JobClock(journal), StopRequests(run_dir, journal))
context.stop.request("walltime")      # unless a request exists already
context.clock.seconds_left()          # until the walltime; infinite without one
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import dataclass, field
from typing import Any

from primerl_hpc.common.errors import TimeoutWaitingError
from primerl_hpc.common.files import create_exclusive, is_there, read_json_or_none
from primerl_hpc.common.waiting import in_daemon_thread
from primerl_hpc.plan.plan import Plan
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.files.journal import Journal
from primerl_hpc.slurm.commands import seconds_left
from primerl_hpc.slurm.question_floor import QuestionFloor

NOTE_S = 5.0
"""Time to count a question in the run directory; it is asked without that if the filesystem does not respond."""


@dataclass
class JobClock:
    """When the job ends, according to SLURM; times are on the monotonic clock."""

    journal: Journal
    job_id: str | None = None
    """The job whose walltime counts; None outside SLURM."""
    questions: QuestionFloor | None = None
    """Counts the questions to SLURM of all processes of the run."""
    ends_at: float = math.inf
    warned_ends_at: float = math.inf
    """The end according to SLURM's walltime warning, which bounds every other answer."""

    async def refresh(self) -> None:
        """Ask SLURM when the job ends: its limit may have changed. Without an answer the known end stays."""
        assert self.job_id is not None
        if self.questions is not None:
            with contextlib.suppress(OSError, TimeoutWaitingError):
                await in_daemon_thread(self.questions.note, limit_s=NOTE_S)
        if (left_s := await seconds_left(self.job_id)) is not None:
            self._set_end(time.monotonic() + left_s)

    def warn(self, margin_s: float) -> None:
        """Record SLURM's warning: no more than ``margin_s`` is left."""
        self.warned_ends_at = time.monotonic() + margin_s
        self._set_end(self.ends_at)

    def seconds_left(self) -> float:
        """Return the time until the walltime ends the job; infinite without one."""
        return self.ends_at - time.monotonic()

    def _set_end(self, ends_at: float) -> None:
        self.ends_at = min(ends_at, self.warned_ends_at)
        left_s = self.seconds_left()
        if not self.journal.is_closing:
            self.journal.update(ends_at=round(time.time() + left_s) if math.isfinite(left_s) else None)


@dataclass
class StopRequests:
    """The request in control/stop, and the signals that the supervisor received."""

    run_dir: RunDir
    journal: Journal
    signals: set[int] = field(default_factory=set)

    def request(self, reason: str) -> None:
        """Write control/stop, which all processes of the run read. An existing request, e.g. a user's, stays."""
        request = json.dumps({"reason": reason})
        self.journal.write(lambda: create_exclusive(self.run_dir.stop_request, request), is_vital=True)

    def is_requested(self) -> bool:
        return is_there(self.run_dir.stop_request)

    def read(self) -> dict[str, Any]:
        """Return the request; empty without one."""
        return read_json_or_none(self.run_dir.stop_request) or {}


@dataclass
class RunContext:
    run_dir: RunDir
    plan: Plan
    """Before an attempt opens, ``layout.auto_split`` may replace it."""
    attempt: int
    journal: Journal
    clock: JobClock
    stop: StopRequests
