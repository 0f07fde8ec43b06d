"""State of one process of a running phase: its current incarnation, and how the previous one ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from primerl_hpc.common.names import Role
from primerl_hpc.plan.plan import OnExit, ProcessPlan
from primerl_hpc.runtime.files.journal import Journal
from primerl_hpc.runtime.step import ExitStatus, Launch, Step

SERVERS = (Role.INFERENCE, Role.PREFILL, Role.ROUTER, Role.TEACHER, Role.JUDGE)


@dataclass
class ProcessState:
    """A new instance is due to start: ``restart_at`` is 0."""

    plan: ProcessPlan
    incarnation: int = -1
    """Number of the current incarnation; the first one is 0."""
    step: Step | None = None
    waiter: asyncio.Task[ExitStatus] | None = None
    """Task that awaits the step's exit; None once the exit was recorded."""
    ended: ExitStatus | None = None
    """Exit status until the policy has decided about it."""
    decide_at: float = 0.0
    launch: Launch | None = None
    started_at: float = 0.0
    ready_at: float | None = None
    url: str = ""
    """Where this incarnation serves; empty until it does."""
    has_reported: bool = False
    """True if it published its endpoint, or the times of its start if it serves nothing."""
    served_s: float = 0.0
    """How long the incarnation that ended was ready."""
    restart_at: float | None = 0.0
    verdict: str = ""
    """Why the supervisor killed it."""
    hosts: tuple[str, ...] = ()
    """Hosts of this incarnation; empty outside SLURM."""
    written: dict[Path, int] = field(default_factory=dict)
    """Sizes of its logs when this incarnation started."""

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def ends_phase(self) -> bool:
        return self.plan.on_exit == OnExit.ENDS_PHASE

    @property
    def is_report_expected(self) -> bool:
        """True until this incarnation reports its endpoint or the times of its start; trackers report neither."""
        return not self.has_reported and self.plan.role != Role.TRACKER

    @property
    def is_ready(self) -> bool:
        return self.ready_at is not None

    def note_report(self, endpoint: dict[str, Any], journal: Journal) -> None:
        """Record that the process serves, or how long its start took if it serves nothing."""
        self.has_reported, url = True, endpoint.get("url") or None
        after_s = round(time.monotonic() - self.started_at, 1)
        phases: dict[str, float] = endpoint.get("phases") or {}
        if phases:
            # the time of scheduler, guard and torchrun before the process itself
            launch_s = round(max(after_s - sum(phases.values()), 0.0), 2)
            phases = {"launch": launch_s, **phases}
            journal.set_process(self.name, start=phases)
        if url is not None:
            self.ready_at, self.url = time.monotonic(), url
            journal.set_process(self.name, state="ready", url=url)
        journal.record("role_ready", process=self.name, after_s=after_s, url=url, phases=phases or None)


def server_urls(processes: Mapping[str, ProcessState]) -> dict[str, str]:
    """Return the addresses of the HTTP servers that are ready, by process."""
    servers = {name: state.url for name, state in processes.items() if state.plan.role in SERVERS}
    return {name: url for name, url in servers.items() if url.startswith(("http://", "https://"))}
