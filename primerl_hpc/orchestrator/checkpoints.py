"""The orchestrator's side of checkpoints: it follows the trainer, which decides when one is made.

Whenever a batch is cut the state is kept in memory. When the trainer's side of step N appears, the state as it was
when batch N was cut is written beside it, so that both sides continue at N + 1 with the same past:

    state.json          sampler, curricula, baselines, random states, counts; the checksum of
    queue.safetensors   the finished rollouts that waited for a batch; not there when none did
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import crc32_of_file, is_there, read_json, read_json_or_none, write_json
from primerl_hpc.common.patience import Patience
from primerl_hpc.common.rundir import COMPLETE, SIDE_DONE, RunDir
from primerl_hpc.orchestrator.queue_file import read_queue, write_queue
from primerl_hpc.orchestrator.scoring import ScoredGroup

logger = logging.getLogger(__name__)

SIDES = ("trainer", "orchestrator")
SIDE = "orchestrator"
QUEUE = "queue.safetensors"
STATE_VERSION = 3
# A trainer is at most two batches behind when it begins to save. What it saves beside training may take many batches:
# the state of a step whose folder is there is kept until our side of it is written. Each keeps its queue in memory.
KEEP_SNAPSHOTS = 6


@dataclass
class CheckpointFollower:
    """``committed``: the highest step whose checkpoint has our side."""

    run: RunDir
    trainer: str
    committed: int = 0
    save_seconds: float = 0.0  # of the last one
    patience: Patience = field(default_factory=lambda: Patience("the checkpoints"))
    _stop: Patience = field(default_factory=lambda: Patience("whether the run is to stop"))
    _snapshots: dict[int, tuple[dict[str, Any], Sequence[ScoredGroup]]] = field(default_factory=dict)

    def remember(self, step: int, state: dict[str, Any], queue: Sequence[ScoredGroup]) -> None:
        """State, and finished groups that wait for a batch, after batch ``step`` was cut."""
        self._snapshots[step] = (state, queue)
        for old in sorted(self._snapshots)[:-KEEP_SNAPSHOTS]:
            if old <= self.committed or not self.run.checkpoint(old).exists():
                del self._snapshots[old]

    def follow(self) -> list[int]:
        """Write our side of every checkpoint that has the trainer's and not ours; the steps that are complete now.

        Slow where much is queued: for a thread, beside `remember`. What a filesystem that falters leaves undone is done by
        the next call.
        """
        written: list[int] = []
        with self.patience:
            self._follow(written)
        return written

    def _follow(self, written: list[int]) -> None:
        for step in self.run.list_steps(self.run.checkpoints, f"trainer/{SIDE_DONE}"):
            if step <= self.committed or step not in self._snapshots:
                continue
            start = time.monotonic()
            state, queue = self._snapshots[step]
            folder = self.run.checkpoint_side(step, SIDE)
            checksum = None
            if queue:
                write_queue(folder / QUEUE, queue)
                checksum = crc32_of_file(folder / QUEUE)
            write_json(
                folder / "state.json",
                {"version": STATE_VERSION, "step": step, "queue_crc32": checksum, **state},
            )
            self.save_seconds = time.monotonic() - start
            if self.run.finish_checkpoint_side(step, SIDE, SIDES):
                written.append(step)
                logger.info("checkpoint step_%d is complete", step)
            self.committed = step

    def stopped_at(self) -> int | None:
        """The step at which the trainer stopped because it was asked to; None while it has not."""
        with self._stop:
            if not is_there(self.run.stop_request):
                return None
            outcome = read_json_or_none(self.run.outcome(self.trainer)) or {}
            if outcome.get("outcome") == "stopped" and outcome.get("attempt", env.attempt()) == env.attempt():
                return int(outcome["step"])
        return None

    def is_complete(self, step: int) -> bool:
        with self.patience:
            return step == 0 or is_there(self.run.checkpoint(step) / COMPLETE)
        return False


def load_state(run: RunDir, step: int) -> dict[str, Any]:
    """What `CheckpointFollower` wrote for ``step``.

    Raises DataError when it is missing or of another version.
    """
    path = run.checkpoint_side(step, SIDE) / "state.json"
    try:
        state = read_json(path)
    except FileNotFoundError:
        raise DataError("the checkpoint's orchestrator side is missing", place=str(path)) from None
    if state.get("version") != STATE_VERSION or state.get("step") != step:
        raise DataError(
            f"orchestrator state of version {state.get('version')}, step {state.get('step')}; "
            f"expected version {STATE_VERSION}, step {step}",
            place=str(path),
        )
    return state


def load_queue(run: RunDir, step: int, state: dict[str, Any]) -> list[ScoredGroup]:
    """The groups that waited when ``state`` was written. Raises DataError when their file is not what was written."""
    if state["queue_crc32"] is None:
        return []
    path = run.checkpoint_side(step, SIDE) / QUEUE
    groups = read_queue(path)
    if crc32_of_file(path) != state["queue_crc32"]:
        raise DataError("the checkpoint's queue of finished rollouts is damaged", place=str(path))
    return groups
