"""Restart policy: what the exit of a process means for the run. Pure: exits in, decisions out; no clock, no files.

A phase is done when every process that can end it exited with 0 (or with 75: stopped and saved). A process that only
serves is restarted, with growing delays, as long as the run makes progress between its failures. When a process that
can end a training phase fails, all such processes restart from the last complete checkpoint. Recovery stops when the
same fault recurs (same role, same step, same cause), or after `recovery.max_without_progress` recoveries without a new
step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.names import Kind, Role
from primerl_hpc.plan.plan import OnExit, PhasePlan

RESTARTS_WITHOUT_PROGRESS = 3
"""Restarts of one process that are allowed while the run finishes no new step."""
SERVED_WELL_S = 600.0
"""Inference-only runs have no steps: there, a process that was ready this long counts as having made progress."""

RECOVERY_PAUSE_S, MAX_RECOVERY_PAUSE_S = 1.0, 60.0
FINAL = frozenset((ExitCode.USAGE, ExitCode.CONFIG, ExitCode.DATA, ExitCode.NO_CONTINUE))
"""Exit codes after which a retry would fail in the same way."""


class Action(StrEnum):
    CONTINUE = "continue"
    RESTART = "restart"
    RECOVER = "recover"  # restart all processes that can end the phase, from the last complete checkpoint
    PHASE_DONE = "phase_done"
    PHASE_STOPPED = "phase_stopped"
    FAIL = "fail"


@dataclass(frozen=True)
class RestartDecision:
    action: Action
    delay_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Fault:
    """The failure of a process that the phase needs. Two equal faults have the same location and the same cause."""

    role: Role
    after_step: float
    """The last finished step when the process failed."""
    cause: str
    """How the process ended and why, without variable parts."""


@dataclass(frozen=True)
class ProcessExit:
    """The exit of a process, and what the run had done by then."""

    code: int
    progress: int
    """Any number that grows with each finished step, also with a repeated one."""
    step: int = 0
    """The highest step ever finished."""
    after_step: float = 0
    """The last step finished when the process ended; lower than ``step`` after a recovery."""
    cause: str = ""
    """How the process ended and why. Exits with equal causes are the same fault."""
    is_killed: bool = False
    """True if it was killed from outside, which is not a fault at this step."""
    is_lost: bool = False
    """True if it ended with its node, which is not the run's fault."""
    served_s: float = 0.0
    """How long this incarnation was ready, in seconds."""


@dataclass
class PhasePolicy:
    phase: PhasePlan
    finished: set[str] = field(default_factory=set)
    stopped: set[str] = field(default_factory=set)
    _highest_step: int = 0
    """The highest step that was finished before the previous fault."""
    _without_progress: int = 0
    """Recoveries since the last new step."""
    _faults: set[Fault] = field(default_factory=set)
    """Faults since the last new step, except kills from outside."""
    _budget: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Process → progress at the first failure of the current series, and the number of failures since."""

    def on_exit(self, name: str, end: ProcessExit) -> RestartDecision:
        """Decide what the exit of process ``name`` means for the phase."""
        process = self.phase.process(name)
        if process.on_exit == OnExit.RESTART:
            return self._restart(name, end)
        if process.on_exit == OnExit.OPTIONAL:
            decision = self._restart(name, end)
            return (
                decision
                if decision.action == Action.RESTART
                else RestartDecision(Action.CONTINUE, reason=decision.reason)
            )
        if end.code == ExitCode.DONE:
            self.finished.add(name)
        elif end.code == ExitCode.STOPPED:
            self.stopped.add(name)
        else:
            if end.step > self._highest_step:
                self._highest_step, self._without_progress = end.step, 0
                self._faults.clear()
            is_external = end.is_killed or end.is_lost
            fault = None if is_external else Fault(process.role, end.after_step, end.cause or str(end.code))
            return self._recover(name, end.code, fault, is_counted=not end.is_lost)
        ending = {process.name for process in self.phase.processes if process.on_exit == OnExit.ENDS_PHASE}
        if ending - self.finished - self.stopped:
            return RestartDecision(Action.CONTINUE)
        return RestartDecision(Action.PHASE_STOPPED if self.stopped else Action.PHASE_DONE)

    def _recover(self, name: str, code: int, fault: Fault | None, *, is_counted: bool) -> RestartDecision:
        """``fault``: None if the run itself is not at fault; ``is_counted``: count it against max_without_progress."""
        recovery = self.phase.recipe.recovery
        is_training = self.phase.recipe.kind in (Kind.RL, Kind.SFT)
        may_recover = recovery.in_place or not is_counted  # a lost node is no failure of the run
        if not is_training or not may_recover or code in FINAL:
            return RestartDecision(Action.FAIL, reason=f"{name} exited before its work was done")
        if fault is not None and fault in self._faults:
            return RestartDecision(
                Action.FAIL,
                reason=f"{name} failed twice after step {fault.after_step} with the same cause, without a new step "
                "in between",
            )
        if is_counted and self._without_progress >= recovery.max_without_progress:
            return RestartDecision(
                Action.FAIL,
                reason=f"{name} failed after {self._without_progress} recoveries without a new step "
                "(recovery.max_without_progress)",
            )
        delay_s = min(RECOVERY_PAUSE_S * 4**self._without_progress, MAX_RECOVERY_PAUSE_S)
        self._without_progress += is_counted
        if fault is not None:
            self._faults.add(fault)
        self.finished.clear()
        self.stopped.clear()
        return RestartDecision(Action.RECOVER, delay_s, reason=f"{name} exited before its work was done")

    def _restart(self, name: str, end: ProcessExit) -> RestartDecision:
        if end.is_lost:
            return RestartDecision(Action.RESTART)
        if end.code in FINAL:
            return RestartDecision(
                Action.FAIL, reason=f"{name} cannot be restarted: its configuration or data is invalid"
            )
        since, failures = self._budget.get(name, (end.progress, 0))
        only_serves = self.phase.recipe.kind == Kind.INFERENCE
        if end.progress > since or (only_serves and end.served_s >= SERVED_WELL_S):
            since, failures = end.progress, 0
        if failures >= RESTARTS_WITHOUT_PROGRESS:
            required = f"serving for {SERVED_WELL_S:.0f} s" if only_serves else "progress of the run"
            reason = f"{name} failed {failures + 1} times without {required} in between"
            return RestartDecision(Action.FAIL, reason=reason)
        self._budget[name] = (since, failures + 1)
        return RestartDecision(Action.RESTART, delay_s=0.5 * (4**failures - 1))
