"""What the end of a process means for the run. Pure: exits in, decisions out; no clock, no files.

A phase ends well when every process that can end it exited with 0 (or 75: stopped and saved). A process that only
serves is started again, with growing pauses, as long as the run makes progress between its deaths.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.plan.types import OnExit, PhasePlan

RESTARTS_WITHOUT_PROGRESS = 3
"""Deaths of one process that are forgiven while the run shows no new step."""


class Action(StrEnum):
    GO_ON = "go_on"
    RESTART = "restart"
    PHASE_DONE = "phase_done"
    PHASE_STOPPED = "phase_stopped"
    FAIL = "fail"


@dataclass(frozen=True)
class Decision:
    action: Action
    delay_s: float = 0.0
    reason: str = ""


@dataclass
class PhasePolicy:
    phase: PhasePlan
    finished: set[str] = field(default_factory=set)
    stopped: set[str] = field(default_factory=set)
    restarts: dict[str, int] = field(default_factory=dict)
    """Restarts of each process in this phase, for `status`."""
    _budget: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Per process: progress at its first death of the current streak, and deaths since."""

    def on_exit(self, name: str, code: int, *, progress: int) -> Decision:
        """``progress`` is any number that grows with every finished step."""
        process = self.phase.process(name)
        if process.on_exit == OnExit.RESTART:
            return self._restart(name, code, progress)
        if process.on_exit == OnExit.OPTIONAL:
            decision = self._restart(name, code, progress)
            return (
                decision
                if decision.action == Action.RESTART
                else Decision(Action.GO_ON, reason=decision.reason)
            )
        if code == ExitCode.DONE:
            self.finished.add(name)
        elif code == ExitCode.STOPPED:
            self.stopped.add(name)
        else:
            return Decision(Action.FAIL, reason=f"{name} ended before its work was done")
        ending = {each.name for each in self.phase.processes if each.on_exit == OnExit.ENDS_PHASE}
        if ending - self.finished - self.stopped:
            return Decision(Action.GO_ON)
        return Decision(Action.PHASE_STOPPED if self.stopped else Action.PHASE_DONE)

    def _restart(self, name: str, code: int, progress: int) -> Decision:
        if code in (ExitCode.CONFIG, ExitCode.DATA, ExitCode.NO_CONTINUE):
            return Decision(
                Action.FAIL, reason=f"{name} cannot start again: its configuration or data is wrong"
            )
        since, deaths = self._budget.get(name, (progress, 0))
        if progress > since:
            since, deaths = progress, 0
        if deaths >= RESTARTS_WITHOUT_PROGRESS:
            return Decision(
                Action.FAIL, reason=f"{name} died {deaths + 1} times without a new step of the run in between"
            )
        self._budget[name] = (since, deaths + 1)
        self.restarts[name] = self.restarts.get(name, 0) + 1
        return Decision(Action.RESTART, delay_s=0.5 * (4**deaths - 1))
