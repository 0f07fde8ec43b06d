"""The orchestrator's side of checkpoints: it follows the trainer, which decides when one is made.

Whenever a batch is cut the state is kept in memory. When the trainer's side of step N appears, the state as it was
when batch N was cut is written beside it, so that both sides continue at N + 1 with the same past.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import is_there, read_json, read_json_or_none, write_json
from primerl_hpc.common.rundir import COMPLETE, SIDE_DONE, RunDir

logger = logging.getLogger(__name__)

SIDES = ("trainer", "orchestrator")
SIDE = "orchestrator"
STATE_VERSION = 2
# A trainer is at most two batches behind when it begins to save. What it saves beside training may take many batches:
# the state of a step whose folder is there is kept until our side of it is written.
KEEP_SNAPSHOTS = 16


@dataclass
class CheckpointFollower:
    """``committed``: the highest step whose checkpoint has our side."""

    run: RunDir
    trainer: str
    committed: int = 0

    def __post_init__(self) -> None:
        self._snapshots: dict[int, dict[str, Any]] = {}

    def remember(self, step: int, state: dict[str, Any]) -> None:
        """State after batch ``step`` was cut."""
        self._snapshots[step] = state
        for old in sorted(self._snapshots)[:-KEEP_SNAPSHOTS]:
            if old <= self.committed or not self.run.checkpoint(old).exists():
                del self._snapshots[old]

    def follow(self) -> list[int]:
        """Write our side of every checkpoint that has the trainer's and not ours; the steps that are complete now."""
        written = []
        for step in self.run.list_steps(self.run.checkpoints, f"trainer/{SIDE_DONE}"):
            if step <= self.committed or step not in self._snapshots:
                continue
            write_json(
                self.run.checkpoint_side(step, SIDE) / "state.json",
                {"version": STATE_VERSION, "step": step, **self._snapshots[step]},
            )
            if self.run.finish_checkpoint_side(step, SIDE, SIDES):
                written.append(step)
                logger.info("checkpoint step_%d is complete", step)
            self.committed = step
        return written

    def stopped_at(self) -> int | None:
        """The step at which the trainer stopped because it was asked to; None while it has not."""
        if not is_there(self.run.stop_request):
            return None
        outcome = read_json_or_none(self.run.outcome(self.trainer)) or {}
        if outcome.get("outcome") != "stopped" or outcome.get("attempt", env.attempt()) != env.attempt():
            return None
        return int(outcome["step"])

    def is_complete(self, step: int) -> bool:
        return step == 0 or is_there(self.run.checkpoint(step) / COMPLETE)


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
