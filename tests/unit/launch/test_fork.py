"""A new run from another run's checkpoint: links and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from primerl_hpc.common.errors import ConfigError, NotFoundError, PrimerlError
from primerl_hpc.common.files import write_json, write_text
from primerl_hpc.launch.fork import import_checkpoint
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.recipe.resolve import resolve
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import COMPLETE

RECIPE = """
kind: sft
name: forked
model: {{name: org/model}}
max_steps: {max_steps}
sft: {{data: {{path: org/data}}}}
checkpoint: {{fork: {fork}}}
"""


@pytest.fixture
def other(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "other")
    write_json(run.plan, {})
    for step in (2, 4):
        write_text(run.checkpoint_side(step, "trainer") / "state.json", f"{step}")
        write_text(run.checkpoint(step) / COMPLETE, "")
    write_text(run.checkpoint_side(6, "trainer.tmp") / "state.json", "6")
    return run


def load(tmp_path: Path, fork: str, max_steps: int = 9):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(fork=fork, max_steps=max_steps))
    return resolve(load_recipe(path), folder=tmp_path)


def test_the_latest_complete_checkpoint_is_linked_with_a_note(tmp_path, other):
    recipe = load(tmp_path, "{run: other, skip: [data]}")
    run = RunDir(tmp_path / "new")
    import_checkpoint(run, recipe)
    assert run.complete_checkpoints() == [4]
    assert run.fork_skips(4) == ["data"]
    copy = run.checkpoint_side(4, "trainer") / "state.json"
    assert copy.samefile(other.checkpoint_side(4, "trainer") / "state.json")
    run.delete_step(run.checkpoint(4), COMPLETE)
    assert other.complete_checkpoints() == [2, 4]


@pytest.mark.parametrize(
    ("fork", "words"),
    [
        ("{run: nowhere}", "nowhere is not a run directory"),
        ("{run: other, step: 6}", "has no complete checkpoint of step 6; it has 2, 4"),
        ("{run: other, step: 9}", "checkpoint.fork.step 9 must be less than max_steps 9"),
        ("{run: other, skip: [weights]}", "skip"),
    ],
)
def test_a_fork_from_a_missing_checkpoint_is_refused(tmp_path, other, fork, words):
    with pytest.raises(PrimerlError, match=words):
        load(tmp_path, fork)


def test_a_fork_with_no_step_left_is_refused(tmp_path, other):
    with pytest.raises(ConfigError, match=r"yaml:\d+: checkpoint 4 of .*other is not less than max_steps 4"):
        load(tmp_path, "{run: other}", max_steps=4)


def test_a_run_without_checkpoints_is_named(tmp_path):
    write_json(RunDir(tmp_path / "empty").plan, {})
    with pytest.raises(NotFoundError, match="has no complete checkpoint; it has none"):
        load(tmp_path, "{run: empty}")
