"""What the end of a process means for the run. Pure: exits in, decisions out; no clock, no files.

A phase ends well when every process that can end it exited with 0 (or 75: stopped and saved). A process that only
serves is started again, with growing pauses, as long as the run makes progress between its deaths. When one of those
that can end a training phase dies, all of them start again from the last complete checkpoint, as long as the run shows
a new step between such faults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.names import Kind
from primerl_hpc.plan.types import OnExit, PhasePlan

RESTARTS_WITHOUT_PROGRESS = 3
"""Deaths of one process that are forgiven while the run shows no new step."""
SERVED_WELL_S = 600.0
"""A run that only serves shows no steps: there, a process that was ready for so long has made progress."""

RECOVERY_PAUSE_S, MAX_RECOVERY_PAUSE_S = 1.0, 60.0
FINAL = frozenset((ExitCode.USAGE, ExitCode.CONFIG, ExitCode.DATA, ExitCode.NO_CONTINUE))
"""Codes after which another try would end the same way."""


class Action(StrEnum):
    GO_ON = "go_on"
    RESTART = "restart"
    RECOVER = "recover"  # all that can end the phase, from the last complete checkpoint
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
    recoveries: int = 0
    _recovered_at: int = -1
    """The last step that was finished before the last recovery."""
    _budget: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Per process: progress at its first death of the current streak, and deaths since."""

    def on_exit(
        self,
        name: str,
        code: int,
        *,
        progress: int,
        step: int = 0,
        is_lost: bool = False,
        served_s: float = 0.0,
    ) -> Decision:
        """``progress`` is any number that grows with every finished step, also with one that is done again.

        ``step`` is the highest one ever finished. ``is_lost``: it ended with its node, which is not the run's fault.
        ``served_s``: for how long this life of the process was ready.
        """
        process = self.phase.process(name)
        if process.on_exit == OnExit.RESTART:
            return self._restart(name, code, progress, is_lost, served_s)
        if process.on_exit == OnExit.OPTIONAL:
            decision = self._restart(name, code, progress, is_lost, served_s)
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
            return self._recover(name, code, step, is_lost)
        ending = {each.name for each in self.phase.processes if each.on_exit == OnExit.ENDS_PHASE}
        if ending - self.finished - self.stopped:
            return Decision(Action.GO_ON)
        return Decision(Action.PHASE_STOPPED if self.stopped else Action.PHASE_DONE)

    def _recover(self, name: str, code: int, step: int, is_lost: bool) -> Decision:
        is_training = self.phase.recipe.kind in (Kind.RL, Kind.SFT)
        if not is_training or not self.phase.recipe.recovery.in_place or code in FINAL:
            return Decision(Action.FAIL, reason=f"{name} ended before its work was done")
        if step <= self._recovered_at and not is_lost:
            return Decision(
                Action.FAIL, reason=f"{name} died again without a new step since the last recovery"
            )
        delay_s = min(RECOVERY_PAUSE_S * 2**self.recoveries, MAX_RECOVERY_PAUSE_S)
        self.recoveries, self._recovered_at = self.recoveries + 1, max(step, self._recovered_at)
        self.finished.clear()
        self.stopped.clear()
        return Decision(Action.RECOVER, delay_s, reason=f"{name} ended before its work was done")

    def _restart(self, name: str, code: int, progress: int, is_lost: bool, served_s: float) -> Decision:
        if is_lost:
            return Decision(Action.RESTART)
        if code in FINAL:
            return Decision(
                Action.FAIL, reason=f"{name} cannot start again: its configuration or data is wrong"
            )
        since, deaths = self._budget.get(name, (progress, 0))
        only_serves = self.phase.recipe.kind == Kind.INFERENCE
        if progress > since or (only_serves and served_s >= SERVED_WELL_S):
            since, deaths = progress, 0
        if deaths >= RESTARTS_WITHOUT_PROGRESS:
            lack = f"serving for {SERVED_WELL_S:.0f} s" if only_serves else "progress of the run"
            return Decision(Action.FAIL, reason=f"{name} died {deaths + 1} times without {lack} in between")
        self._budget[name] = (since, deaths + 1)
        return Decision(Action.RESTART, delay_s=0.5 * (4**deaths - 1))
