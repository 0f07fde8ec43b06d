"""The seam between the supervisor and what runs processes: a `Step` is one process of the plan, started once.

Two kinds: `LocalStep` (a child process) and `SrunStep` (a SLURM step named after the process). The supervisor sees
no difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from primerl_hpc.common import env
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.plan.types import ProcessPlan


@dataclass(frozen=True)
class ExitStatus:
    """How a step ended: an exit code, or the signal that ended it; where, and which log tells why, if not the plain one."""

    code: int
    host: str | None = None
    log: Path | None = None

    @property
    def signal(self) -> int | None:
        if self.code < 0:
            return -self.code
        return self.code - 128 if 128 < self.code < 128 + 65 else None

    def __str__(self) -> str:
        import signal

        if self.signal is None:
            return f"exit code {self.code}"
        try:
            return signal.Signals(self.signal).name
        except ValueError:
            return f"signal {self.signal}"


@dataclass(frozen=True)
class Launch:
    """Everything a step needs besides the plan: which life of which process, and where its output goes."""

    process: ProcessPlan
    run_dir: RunDir
    phase: str
    attempt: int
    incarnation: int

    @property
    def log(self) -> Path:
        return self.run_dir.attempt_logs(self.attempt) / self.process.log

    @property
    def scheduler_log(self) -> Path:
        """What srun itself says: why a step could not start, who ended first."""
        return self.run_dir.attempt_logs(self.attempt) / "slurm" / f"{self.process.name}.log"

    @property
    def environment(self) -> dict[str, str]:
        """Variables on top of the supervisor's own environment."""
        return {
            **self.process.env,
            env.RUN_DIR: str(self.run_dir.root),
            env.PROCESS: self.process.name,
            env.PHASE: self.phase,
            env.ATTEMPT: str(self.attempt),
            env.INCARNATION: str(self.incarnation),
            "PYTHONUNBUFFERED": "1",
        }


class Step(Protocol):
    """One started process. `start` returns when it was handed over, not when it is ready."""

    async def start(self) -> None: ...

    async def wait(self) -> ExitStatus: ...

    async def terminate(self) -> None:
        """Ask it to end: SIGTERM to its tasks; its guard ends the tree after the grace. Safe to call twice."""

    async def dump_stacks(self) -> None:
        """Have its Python processes write their stacks into its log."""

    async def kill(self) -> None:
        """End it now, with everything below it. Safe to call twice."""
