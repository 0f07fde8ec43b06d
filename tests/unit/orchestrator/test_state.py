"""The orchestrator side of a checkpoint: it follows the trainer, holds the state of the same step, and is checked."""

from __future__ import annotations

import pytest

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import write_json, write_text
from primerl_hpc.orchestrator.checkpoint.follower import SIDES, CheckpointFollower, load_state
from primerl_hpc.run.rundir import RunDir


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir(tmp_path)


def trainer_saves(run: RunDir, step: int) -> None:
    run.finish_checkpoint_side(step, "trainer", SIDES)


def test_checkpoint_is_complete_only_when_both_sides_are_there(run):
    follower = CheckpointFollower(run, "trainer-0")
    for step in (1, 2, 3):
        follower.remember(step, {"cursor": step * 10}, [])
    assert follower.follow() == []
    trainer_saves(run, 2)
    assert run.latest_checkpoint() is None
    assert follower.follow() == [2]
    assert run.latest_checkpoint() == 2


def test_saved_state_is_the_one_of_that_step_and_not_of_now(run):
    follower = CheckpointFollower(run, "trainer-0")
    for step in (1, 2, 3):
        follower.remember(step, {"cursor": step * 10}, [])
    trainer_saves(run, 2)
    follower.follow()
    assert load_state(run, 2)["cursor"] == 20


def test_a_save_that_takes_many_batches_finds_the_state_of_its_step(run):
    follower = CheckpointFollower(run, "trainer-0")
    follower.remember(1, {"cursor": 1}, [])
    run.checkpoint_side(1, "trainer.tmp").mkdir(parents=True)
    assert follower.follow() == []
    for step in range(2, 60):
        follower.remember(step, {"cursor": step}, [])
    trainer_saves(run, 1)
    assert follower.follow() == [1]
    assert load_state(run, 1)["cursor"] == 1


def test_a_checkpoint_is_written_once(run):
    follower = CheckpointFollower(run, "trainer-0")
    follower.remember(1, {"cursor": 1}, [])
    trainer_saves(run, 1)
    assert follower.follow() == [1]
    follower.remember(1, {"cursor": 99}, [])
    assert follower.follow() == []
    assert load_state(run, 1)["cursor"] == 1


def test_memory_of_old_steps_is_bounded(run):
    follower = CheckpointFollower(run, "trainer-0")
    for step in range(1, 101):
        follower.remember(step, {}, [])
    trainer_saves(run, 1)
    assert follower.follow() == []


def test_trainer_that_stopped_is_believed_only_when_a_stop_was_asked_for(run):
    follower = CheckpointFollower(run, "trainer-0")
    write_json(run.outcome("trainer-0"), {"outcome": "stopped", "step": 4})
    assert follower.stopped_at() is None
    write_text(run.stop_request, "")
    assert follower.stopped_at() == 4


@pytest.mark.parametrize("state", [{"version": 0, "step": 2}, {"version": 3, "step": 3}])
def test_foreign_state_is_refused_with_its_path(run, state):
    path = run.checkpoint_side(2, "orchestrator") / "state.json"
    write_json(path, state)
    with pytest.raises(DataError, match="expected") as caught:
        load_state(run, 2)
    assert caught.value.location == str(path)


def test_missing_side_is_refused_with_its_path(run):
    with pytest.raises(DataError, match="missing"):
        load_state(run, 2)
