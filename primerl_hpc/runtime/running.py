"""What `PhaseRun` knows of one process of its phase: its present life, and how the last one ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from primerl_hpc.plan.types import ProcessPlan
from primerl_hpc.runtime.steps import ExitStatus, Launch, Step


@dataclass
class Running:
    """A new one is due to start."""

    process: ProcessPlan
    incarnation: int = -1
    """Of the present life; the first one is 0."""
    step: Step | None = None
    waiter: asyncio.Task[ExitStatus] | None = None
    """While it lives, and until its end was noticed."""
    ended: ExitStatus | None = None
    """How, until it is decided what that means for the run."""
    decide_at: float = 0.0
    launch: Launch | None = None
    started_at: float = 0.0
    ready_at: float | None = None
    served_s: float = 0.0
    """For how long the life that has ended was ready."""
    restart_at: float | None = 0.0
    verdict: str = ""
    """Why we ended it."""
    hosts: tuple[str, ...] = ()
    """Where this life runs; empty outside SLURM."""
    written: dict[Path, int] = field(default_factory=dict)
    """Sizes of its logs when this life began."""

    @property
    def is_ready(self) -> bool:
        return self.ready_at is not None
