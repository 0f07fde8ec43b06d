"""When a job must start its final save so that no step is lost at the walltime, learned from its steps and saves.

The same decision stops a run before its budget of hours (``--budget``) is used.

SLURM's warning comes at a fixed margin, up to a minute early, and is lost if the job's shell was not ready. So the
supervisor watches the end of its job itself. `Deadline` is pure; `WalltimeWatch` reads the files and asks SLURM.

A stop that is requested during a step takes effect at the end of the step; then the state is saved. So no step may
start that would not fit, with its save, into the remaining time: each is assumed to be as slow as the slowest recent
one plus 10 %, and a reserve is kept for the teardown.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from primerl_hpc.common.files import read_last_jsonl
from primerl_hpc.common.names import Kind
from primerl_hpc.common.waiting import in_daemon_thread
from primerl_hpc.plan.plan import PhasePlan
from primerl_hpc.run.ledger.attempts import used_s
from primerl_hpc.run.rundir import BUDGET, GOAL
from primerl_hpc.run.scores import MetricSeries
from primerl_hpc.runtime.context import RunContext
from primerl_hpc.runtime.job.requeue import WALLTIME
from primerl_hpc.runtime.step_history import ProgressWatch

LAST_ROWS = 10
"""Number of recent steps to learn from: a temporary slowdown of a filesystem is forgotten after that many."""
HEADROOM = 1.1
RESERVE_S = 30.0
"""Part of the walltime kept for the teardown and the requeue."""
CHECK_AGAIN_S = 600.0
"""Interval between questions to SLURM: the limit of a running job may change."""


@dataclass
class Deadline:
    """Pure: rows of metrics and times in, a decision out."""

    margin_s: float
    """Minimum, and the assumed duration of a save until one was measured."""
    save_s: float | None = None
    """Slowest save so far in seconds, from the end of its step until trainer and orchestrator state are complete."""
    step_s: float = 0.0
    """Slowest of the recent steps in seconds, without the wait for its batch and without its save."""
    has_step: bool = False
    """True if this attempt finished a step."""
    _last: Mapping[str, Any] = field(default_factory=lambda: {"step": 0, "time": 0.0})
    """Metrics row of the last step of this attempt."""
    _began: float | None = None
    """When the current step started; None between steps."""
    _saves: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Step → (when it ended, seconds it was blocked by its save), for checkpoints written in the background."""

    def learn(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        attempt: int,
        batch: int | None,
        checkpoint: int,
        now: float,
    ) -> None:
        """Update from what trainer and orchestrator wrote so far, as seen at ``now`` (any clock).

        ``rows``: the trainer's last rows, oldest first; ``batch``: the last available batch, None if steps do not wait
        for batches (SFT); ``checkpoint``: the last complete one.
        """
        self.step_s = max((_busy_s(row) for row in rows), default=0.0)
        for row in rows:
            if "time/save_ckpt" in row:
                self._saw_save(_seconds(row, "time/save_ckpt"))
            if row.get("attempt") == attempt and row["time"] > self._last["time"]:
                self._add_row(row, now)
        for step in [saved for saved in self._saves if saved <= checkpoint]:
            ended, waited_s = self._saves.pop(step)
            self._saw_save(now - ended + waited_s)
        is_under_way = self.has_step if batch is None else batch > self._last["step"]
        if not is_under_way:
            self._began = None
        elif self._began is None:
            self._began = now
        else:
            self.step_s = max(self.step_s, now - self._began)

    def _add_row(self, row: Mapping[str, Any], now: float) -> None:
        self.has_step, self._last, self._began = True, row, None
        # after a recovery a step is repeated: the save of its first run never completed
        self._saves = {step: begun for step, begun in self._saves.items() if step < row["step"]}
        if "time/save_ckpt" in row:
            self._saves[row["step"]] = now, _seconds(row, "time/save_ckpt")

    def _saw_save(self, seconds: float) -> None:
        self.save_s = max(seconds, self.save_s or 0.0)

    @property
    def is_saving(self) -> bool:
        return bool(self._saves)

    @property
    def need_s(self) -> float:
        """Return the walltime in seconds that one more step requires; at least the margin."""
        end_s = self.margin_s if self.save_s is None else HEADROOM * self.save_s + RESERVE_S
        return max(self.margin_s, HEADROOM * self.step_s + end_s)

    def is_due(self, left_s: float) -> bool:
        """True if the final save must start with ``left_s`` left. An attempt without a started step has nothing to
        save, so only the margin counts: durations of an earlier attempt do not end it before its first batch."""
        has_begun = self.has_step or self._began is not None
        return left_s <= (self.need_s if has_begun else self.margin_s)


def _seconds(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else 0.0  # NaN and infinities are strings


def _busy_s(row: Mapping[str, Any]) -> float:
    waits = ("time/wait_for_batch", "time/save_ckpt")
    return max(0.0, _seconds(row, "time/step") - sum(_seconds(row, name) for name in waits))


class WalltimeWatch:
    """Decides whether a phase must stop: because its job is about to end, ``stop_when`` is reached, or the budget used.

    The first never happens without SLURM or without a walltime.
    """

    def __init__(
        self,
        context: RunContext,
        phase: PhasePlan,
        watch: ProgressWatch,
        *,
        read: Callable[[Callable[[], Any]], Awaitable[Any]] = in_daemon_thread,
    ) -> None:
        """``read``: does a file operation in a thread."""
        self.read = read
        self.context, self.run_dir = context, context.run_dir.phase(phase.name)
        self.is_rl = phase.recipe.kind == Kind.RL
        self.goal, self.is_goal_reached = phase.recipe.stop_when, False
        self.series = MetricSeries(self.run_dir, self.goal.metric) if self.goal is not None else None
        self.seen: int | None = None
        margin_s = context.plan.signal_margin_s
        self.is_watched = context.clock.job_id is not None and margin_s is not None
        self.deadline = Deadline(margin_s or 0, context.journal.state.get("slowest_save_s"))
        self.next_question = time.monotonic() + CHECK_AGAIN_S
        self.watch, self.progress = watch, -1
        self.budget, self.earlier_s = context.plan.budget, 0.0
        if self.budget is not None:
            self.earlier_s = used_s(context.run_dir, before=context.attempt)
        self.rows: list[dict[str, Any]] = []
        self.batch: int | None = None

    async def why_stop(self) -> str | None:
        """Return the reason for which the phase must stop now, if there is one: its goal, its budget, or the end of its
        job."""
        if await self.read(self._reaches_goal):
            self.is_goal_reached = True
            return GOAL
        if await self.read(self._is_over_budget):
            return BUDGET
        return WALLTIME if await self.is_due() else None

    def _reaches_goal(self) -> bool:
        """True if the metric of ``stop_when`` has its value; the file is read only after new steps or evaluations."""
        goal, series = self.goal, self.series
        if goal is None or series is None or (seen := self.watch.steps()) == self.seen:
            return False
        self.seen = seen
        series.refresh()
        last = series.last(goal.consecutive)
        return len(last) == goal.consecutive and min(last) >= goal.at_least

    def _is_over_budget(self) -> bool:
        """True if one more step and a save would exceed the budget of the run."""
        if self.budget is None:
            return False
        self._learn()
        elapsed_s = time.time() - float(self.context.journal.state["started"])
        return self.deadline.is_due(self.budget.job_s - self.earlier_s - elapsed_s)

    async def is_due(self) -> bool:
        if not self.is_watched:
            return False
        if time.monotonic() >= self.next_question:
            await self._ask_slurm()
        await self.read(self._learn)
        if not self.deadline.is_due(self.context.clock.seconds_left()):
            return False
        await self._ask_slurm()  # the limit may have been extended
        return self.deadline.is_due(self.context.clock.seconds_left())

    async def _ask_slurm(self) -> None:
        self.next_question = time.monotonic() + CHECK_AGAIN_S
        await self.context.clock.refresh()

    def _learn(self) -> None:
        """Update the deadline; shared files are read only when they have changed."""
        attempt, checkpoint = self.context.attempt, 0
        if (progress := self.watch.steps()) != self.progress:
            self.progress = progress
            self.rows = read_last_jsonl(self.run_dir.metrics("trainer" if self.is_rl else "sft"), LAST_ROWS)
            if self.is_rl:
                batches = read_last_jsonl(self.run_dir.metrics("orchestrator"), 1)
                self.batch = max((row["step"] for row in batches if row.get("attempt") == attempt), default=0)
        if self.deadline.is_saving:
            self.watch.hurry()
            checkpoint = self.run_dir.latest_checkpoint() or 0
        self.deadline.learn(
            self.rows, attempt=attempt, batch=self.batch, checkpoint=checkpoint, now=time.monotonic()
        )
        self.context.journal.state["slowest_save_s"] = self.deadline.save_s

    def as_details(self) -> dict[str, float | None]:
        """Return the known durations, for the stop_requested event."""
        left_s, save_s = self.context.clock.seconds_left(), self.deadline.save_s
        budget = {} if self.budget is None else {"budget_s": round(self.budget.job_s, 1)}
        return {
            **budget,
            "need_s": round(self.deadline.need_s, 1),
            "left_s": round(left_s) if math.isfinite(left_s) else None,
            "step_s": round(self.deadline.step_s, 1),
            "save_s": None if save_s is None else round(save_s, 1),
        }
