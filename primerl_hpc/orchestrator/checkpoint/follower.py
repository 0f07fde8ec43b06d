"""Write the orchestrator's side of checkpoints. The trainer decides when a checkpoint is made; this module follows.

Whenever a batch is built, the state is kept in memory. When the trainer's side of step N appears, the state as of batch
N is written next to it, so that both sides continue at N + 1 with the same history:

    state.json          sampler, curricula, baselines, random states, counts; the checksum of
    queue.safetensors   the finished rollouts that waited for a batch; absent if there were none
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import (
    crc32_of_file,
    is_there,
    names_in,
    read_json,
    read_json_or_none,
    write_json,
)
from primerl_hpc.common.safety.decoding import decoding
from primerl_hpc.common.waiting import TransientIOErrors
from primerl_hpc.orchestrator.checkpoint.queue_file import read_queue, write_queue
from primerl_hpc.orchestrator.rollout_data import ScoredGroup
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import COMPLETE, SIDE_DONE, all_steps

logger = logging.getLogger(__name__)

SIDES = ("trainer", "orchestrator")
SIDE = "orchestrator"
QUEUE = "queue.safetensors"
STATE_VERSION = 3
# A trainer is at most async_level + 1 batches behind when it starts to save. An asynchronous save may take many
# batches, so the state of a step whose folder exists is kept until its orchestrator side is written. Each snapshot
# holds its queue.
SPARE_SNAPSHOTS = 4


@dataclass
class CheckpointFollower:
    """Follows the trainer's checkpoints.

    ``committed``: the highest step whose checkpoint has the orchestrator's side.
    """

    run: RunDir
    trainer: str
    committed: int = 0
    max_lead: int = 1  # batches ahead of the live version
    save_seconds: float = 0.0  # of the last save
    patience: TransientIOErrors = field(default_factory=lambda: TransientIOErrors("the checkpoints"))
    _stop: TransientIOErrors = field(default_factory=lambda: TransientIOErrors("the stop request"))
    _snapshots: dict[int, tuple[dict[str, Any], Sequence[ScoredGroup]]] = field(default_factory=dict)

    is_stopping: bool = False
    """True if the run was asked to stop, as of the last call of `stopped_at`."""
    _present: frozenset[int] = frozenset()
    """Steps with a checkpoint, complete or not, as of the last call of `follow`."""

    def remember(self, step: int, state: dict[str, Any], queue: Sequence[ScoredGroup]) -> None:
        """Keep the state after batch ``step`` was built, and the finished groups that wait for a batch."""
        self._snapshots[step] = (state, queue)
        for old in sorted(self._snapshots)[: -(self.max_lead + 1 + SPARE_SNAPSHOTS)]:
            if old <= self.committed or old not in self._present:
                del self._snapshots[old]

    def follow(self) -> list[int]:
        """Write the orchestrator's side of every checkpoint that has only the trainer's.

        Return the steps whose side was written. This is slow if the queue is long, so call it in a thread; `remember`
        may be called meanwhile. If a transient filesystem error interrupts it, the next call continues.
        """
        written: list[int] = []
        with self.patience:
            self._follow(written)
        return written

    def _follow(self, written: list[int]) -> None:
        self._present = frozenset(all_steps(self.run.checkpoints))
        for step in sorted(self._present):
            if step <= self.committed or step not in self._snapshots:
                continue
            if not is_there(self.run.checkpoint_side(step, "trainer") / SIDE_DONE):
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
        """Return the step at which the trainer stopped on request, else None."""
        with self._stop:
            self.is_stopping = self.run.stop_request.name in names_in(self.run.control)
            if not self.is_stopping:
                return None
            outcome = read_json_or_none(self.run.outcome(self.trainer)) or {}
            if outcome.get("outcome") == "stopped" and outcome.get("attempt", env.attempt()) == env.attempt():
                return int(outcome["step"])
        return None

    def is_complete(self, step: int) -> bool:
        """True if the checkpoint of ``step`` is complete (or ``step`` is 0, the start)."""
        with self.patience:
            return step == 0 or is_there(self.run.checkpoint(step) / COMPLETE)
        return False


def load_state(run: RunDir, step: int) -> dict[str, Any]:
    """Return the state that `CheckpointFollower` wrote for ``step``.

    Raises DataError if it is missing or has another format version or step.
    """
    path = run.checkpoint_side(step, SIDE) / "state.json"
    try:
        state = read_json(path)
    except FileNotFoundError:
        raise DataError("the checkpoint's orchestrator side is missing", location=str(path)) from None
    if not isinstance(state, dict):
        raise DataError("the orchestrator's state is not a JSON object", location=str(path))
    if state.get("version") != STATE_VERSION or state.get("step") != step:
        raise DataError(
            f"the orchestrator state has version {state.get('version')} and step {state.get('step')}; "
            f"expected version {STATE_VERSION} and step {step}",
            location=str(path),
        )
    return state


def load_queue(run: RunDir, step: int, state: dict[str, Any]) -> list[ScoredGroup]:
    """Return the groups that waited when ``state`` was written.

    Raises DataError if their file is missing or damaged.
    """
    with decoding("the orchestrator's state is incomplete", location=run.checkpoint_side(step, SIDE)):
        crc32 = state["queue_crc32"]
    if crc32 is None:
        return []
    path = run.checkpoint_side(step, SIDE) / QUEUE
    try:
        found = crc32_of_file(path)
    except FileNotFoundError:
        raise DataError(
            "the checkpoint's queue of finished rollouts is missing", location=str(path)
        ) from None
    if found != crc32:
        raise DataError("the checkpoint's queue of finished rollouts is damaged", location=str(path))
    return read_queue(path)
