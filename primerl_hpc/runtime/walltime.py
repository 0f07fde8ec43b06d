"""When a job must begin to save, so that no step is lost at its walltime: learned from the run's own steps and saves.

SLURM's warning comes at a fixed margin, up to a minute early, and is lost where the job's shell was not there yet. So the
supervisor watches the real end of its job itself. `Deadline` is pure; `WalltimeWatch` feeds it with files and asks SLURM.

A stop that comes while a step runs is heard at its end; then the state is saved. So no step may begin that would not fit
with its save into what is left: each as slow as the slowest of late and a tenth more, and a reserve for the teardown.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from primerl_hpc.common.files import read_last_jsonl
from primerl_hpc.common.names import Kind
from primerl_hpc.plan.types import PhasePlan

if TYPE_CHECKING:
    from primerl_hpc.runtime.supervisor import Supervisor

LAST_ROWS = 10
"""Steps that are learned from: a bad day of a filesystem is forgotten after so many."""
HEADROOM = 1.1
RESERVE_S = 30.0
"""Of the walltime, kept for the teardown and for going back into the queue."""
LOOK_AGAIN_S = 600.0
"""The limit of a running job may be changed."""


@dataclass
class Deadline:
    """Pure: rows of metrics and times in, a verdict out."""

    margin_s: float
    """The least, and what a save is taken to need until one was seen."""
    save_s: float | None = None
    """Slowest save so far, from the end of its step until the checkpoint is whole, both sides."""
    step_s: float = 0.0
    """Slowest of the last steps, without the wait for its batch and without its save."""
    has_step: bool = False
    """Whether this attempt finished one."""
    _last: Mapping[str, Any] = field(default_factory=lambda: {"step": 0, "time": 0.0})
    """Row of the last step of this attempt."""
    _began: float | None = None
    """When the step that is under way began; None between steps."""
    _saves: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Checkpoints that are written beside training: when their step ended, and the seconds that it waited for them."""

    def learn(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        attempt: int,
        batch: int | None,
        checkpoint: int,
        now: float,
    ) -> None:
        """What the trainer and others wrote so far, as seen ``now`` (any clock).

        ``rows``: the trainer's last ones, oldest first; ``batch``: the last that is there, None where steps wait for
        nobody (SFT); ``checkpoint``: the last complete one.
        """
        self.step_s = max((_busy_s(row) for row in rows), default=0.0)
        for row in rows:
            if "time/save_ckpt" in row:
                self._saw_save(_seconds(row, "time/save_ckpt"))
            if row.get("attempt") == attempt and row["time"] > self._last["time"]:
                self._take_in(row, now)
        for step in [each for each in self._saves if each <= checkpoint]:
            ended, waited_s = self._saves.pop(step)
            self._saw_save(now - ended + waited_s)
        is_under_way = self.has_step if batch is None else batch > self._last["step"]
        if not is_under_way:
            self._began = None
        elif self._began is None:
            self._began = now
        else:
            self.step_s = max(self.step_s, now - self._began)

    def _take_in(self, row: Mapping[str, Any], now: float) -> None:
        self.has_step, self._last, self._began = True, row, None
        # a step that is done again after a recovery: the save of its first time never came
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
        """What must be left of the walltime for one more step to begin; never less than the margin."""
        end_s = self.margin_s if self.save_s is None else HEADROOM * self.save_s + RESERVE_S
        return max(self.margin_s, HEADROOM * self.step_s + end_s)

    def is_due(self, left_s: float) -> bool:
        """An attempt that has not begun a step has nothing to save, and goes on for as long as it may: what an earlier
        one learned does not end it before its first batch."""
        has_begun = self.has_step or self._began is not None
        return left_s <= (self.need_s if has_begun else self.margin_s)


def _seconds(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else 0.0  # NaN and infinities are strings


def _busy_s(row: Mapping[str, Any]) -> float:
    waits = ("time/wait_for_batch", "time/save_ckpt")
    return max(0.0, _seconds(row, "time/step") - sum(_seconds(row, name) for name in waits))


class WalltimeWatch:
    """Whether a phase must be asked to stop now, for its job ends. Never without SLURM, or a walltime."""

    def __init__(self, supervisor: Supervisor, phase: PhasePlan) -> None:
        self.supervisor, self.run_dir = supervisor, supervisor.run_dir.phase(phase.name)
        self.is_rl = phase.recipe.kind == Kind.RL
        margin_s = supervisor.plan.signal_margin_s
        self.is_watched = supervisor.nodes is not None and margin_s is not None
        self.deadline = Deadline(margin_s or 0, supervisor.journal.state.get("slowest_save_s"))
        self.next_question = time.monotonic() + LOOK_AGAIN_S
        self.progress = -1
        self.rows: list[dict[str, Any]] = []
        self.batch: int | None = None

    async def is_due(self) -> bool:
        if not self.is_watched:
            return False
        if time.monotonic() >= self.next_question:
            await self._ask_slurm()
        self._learn()
        if not self.deadline.is_due(self.supervisor.seconds_left()):
            return False
        await self._ask_slurm()  # somebody may have given it more time
        return self.deadline.is_due(self.supervisor.seconds_left())

    async def _ask_slurm(self) -> None:
        self.next_question = time.monotonic() + LOOK_AGAIN_S
        await self.supervisor.look_at_walltime()

    def _learn(self) -> None:
        """Shared files are not read for nothing."""
        attempt, checkpoint = self.supervisor.attempt, 0
        if (progress := self.run_dir.progress()) != self.progress:
            self.progress = progress
            self.rows = read_last_jsonl(self.run_dir.metrics("trainer" if self.is_rl else "sft"), LAST_ROWS)
            if self.is_rl:
                batches = read_last_jsonl(self.run_dir.metrics("orchestrator"), 1)
                self.batch = max((row["step"] for row in batches if row.get("attempt") == attempt), default=0)
        if self.deadline.is_saving:
            checkpoint = self.run_dir.latest_checkpoint() or 0
        self.deadline.learn(
            self.rows, attempt=attempt, batch=self.batch, checkpoint=checkpoint, now=time.monotonic()
        )
        self.supervisor.journal.state["slowest_save_s"] = self.deadline.save_s

    def words(self) -> dict[str, float | None]:
        """What is known, for the event of the stop."""
        left_s, save_s = self.supervisor.seconds_left(), self.deadline.save_s
        return {
            "left_s": round(left_s) if math.isfinite(left_s) else None,
            "step_s": round(self.deadline.step_s, 1),
            "save_s": None if save_s is None else round(save_s, 1),
        }
