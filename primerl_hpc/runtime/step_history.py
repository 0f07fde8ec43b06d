"""Progress of a phase as its files show it: finished steps, where an attempt starts, whether the phase is done.

history = StepHistory(run_dir, phase, attempt=1, began_after=10)
history.last(), history.current()     # the highest step ever finished; the step after which the trainer works now
rewind_phase(run_dir, phase)          # drop what was written after the last complete checkpoint
ProgressWatch(run_dir, phase).activity()    # for a process that asks every second
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.common.files import read_jsonl
from primerl_hpc.common.names import Kind
from primerl_hpc.plan.plan import PhasePlan, Plan
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.scores import drop_scores_after, is_evaluated
from primerl_hpc.run.step_dirs import STABLE

BUSY_S, IDLE_S = 1.0, 8.0
"""Interval between reads of the sizes of files: shortly after a change, and without one."""
CALM_S = 10.0
"""Time after the last change from which reads are rare."""


@dataclass
class StepHistory:
    run_dir: RunDir
    phase: PhasePlan
    attempt: int
    began_after: float
    """The step after which the trainer last started."""
    rows_before: int = 0
    """Rows of the trainer's metrics at that time."""

    def steps(self, role: str | None = None) -> list[int]:
        """Return all finished steps of a role, also repeated ones; default: the trainer of the phase."""
        role = role or ("sft" if self.phase.recipe.kind == Kind.SFT else "trainer")
        rows = read_jsonl(self.run_dir.metrics(role))
        return [row["step"] for row in rows if row.get("attempt") == self.attempt]

    def last(self, role: str | None = None) -> int:
        """Return the highest step that any incarnation of a role finished."""
        return max(self.steps(role), default=0)

    def current(self) -> float:
        """Return the last finished step; less than `last` while steps are repeated after a recovery."""
        return next(reversed(self.steps()[self.rows_before :]), self.began_after)

    def restart_after(self, step: int) -> None:
        """Record that the trainer restarts after this step."""
        self.rows_before, self.began_after = len(self.steps()), step

    def activity(self) -> int:
        """Return a number that changes with every step and every finished rollout."""
        traces = [self.run_dir.phase(self.phase.name).traces(split) for split in ("train", "eval")]
        return self.run_dir.progress() + sum(path.stat().st_size for path in traces if path.exists())

    def progress(self) -> int:
        """Return a number that grows with finished steps; without training, with finished rollouts too."""
        is_training = self.phase.recipe.kind in (Kind.RL, Kind.SFT)
        return self.run_dir.progress() if is_training else self.activity()


class ProgressWatch:
    """Sizes of the files that grow while a phase makes progress, read rarely while none of them grows."""

    def __init__(self, run_dir: RunDir, phase: PhasePlan, *, busy_s: float = BUSY_S) -> None:
        recipe, data = phase.recipe, run_dir.phase(phase.name)
        roles = {Kind.RL: ("trainer", "orchestrator", "eval"), Kind.SFT: ("sft", "eval")}
        self._metrics = [run_dir.metrics(role) for role in roles.get(recipe.kind, ("eval",))]
        splits = ("train", "eval") if recipe.kind == Kind.RL else ("eval",)
        self._traces = [data.traces(split) for split in splits]
        self._busy_s, self._idle_s = busy_s, max(busy_s, min(IDLE_S, recipe.timeouts.stall_s / 10))
        self._sizes: dict[str, int] = {}
        self._changed_at, self._next_read = time.monotonic(), 0.0

    def steps(self) -> int:
        """Return a number that changes with every row of metrics, and thus with every finished step."""
        sizes = self._read()
        return sum(sizes[str(path)] for path in self._metrics)

    def activity(self) -> int:
        """Return a number that changes with every step and every finished rollout."""
        return sum(self._read().values())

    def hurry(self) -> None:
        """Read the sizes often for a while, because their next change has to be noticed in time."""
        self._changed_at = time.monotonic()
        self._next_read = min(self._next_read, self._changed_at + self._busy_s)

    def _read(self) -> dict[str, int]:
        """Return the sizes by path, as of the last read. Raises OSError, except for missing files."""
        now = time.monotonic()
        if now >= self._next_read:
            sizes = {str(path): _size(path) for path in (*self._metrics, *self._traces)}
            if sizes != self._sizes:
                self._changed_at = now
            self._sizes = sizes
            self._next_read = now + (self._idle_s if now - self._changed_at > CALM_S else self._busy_s)
        return self._sizes


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def is_phase_done(run: RunDir, phase: PhasePlan) -> bool:
    """True if a training phase's last weights are stable, and its last checkpoint and evaluations complete if due."""
    recipe = phase.recipe
    if recipe.kind not in (Kind.RL, Kind.SFT) or not (run.weights_step(recipe.steps) / STABLE).exists():
        return False
    if recipe.is_evaluated_online and recipe.evaluation is not None:
        labels = [environment.label for environment in recipe.environments.eval]
        if not is_evaluated(run, recipe.evaluation.versions_of_training(recipe.steps), labels):
            return False
    return not recipe.checkpoint.at_end or run.latest_checkpoint() == recipe.steps


def next_start(run_dir: RunDir, plan: Plan) -> dict[str, Any] | None:
    """Return ``{"phase", "step"}`` at which an attempt would start now; None if all phases are done."""
    for phase in plan.phases:
        run = run_dir.phase(phase.name)
        if not is_phase_done(run, phase):
            return {"phase": phase.name, "step": run.latest_checkpoint() or 0}
    return None


def rewind_phase(run_dir: RunDir, phase: PhasePlan) -> int:
    """Delete what was written after the last complete checkpoint; return that step, 0 without a checkpoint."""
    run = run_dir.phase(phase.name)
    step = run.latest_checkpoint() or 0
    if phase.recipe.kind in (Kind.RL, Kind.SFT):
        run.delete_after(step)
        drop_scores_after(run, step)
    return step
