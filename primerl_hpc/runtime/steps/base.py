"""Interface between the supervisor and what runs processes: a `Step` is one process of the plan, started once.

Two implementations: `LocalStep` (a child process) and `SrunStep` (a SLURM step named after the process).
"""

from __future__ import annotations

from typing import Protocol

from primerl_hpc.runtime.types import ExitStatus


class Step(Protocol):
    """One process. `start` returns when the process was started, not when it is ready."""

    def prepare(self) -> None:
        """Open its log and read the keys for its environment: the file operations of `start`, which need a
        thread. The folder of the process's own log exists already."""

    async def start(self) -> None: ...

    async def wait(self) -> ExitStatus: ...

    async def terminate(self) -> None:
        """Send SIGTERM to its tasks; its guard kills the process tree after the grace time. Safe to call twice."""

    async def dump_stacks(self) -> None:
        """Make its Python processes write their stacks to its log."""

    async def kill(self) -> None:
        """Kill it and all its descendants now. Safe to call twice."""
