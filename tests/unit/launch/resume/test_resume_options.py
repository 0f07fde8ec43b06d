"""``resume --step`` moves what came later and deletes nothing; ``resume --set`` changes safe keys and records it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from primerl_hpc.cli.main import cli
from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import ConfigError, NotFoundError, PrimerlError
from primerl_hpc.common.files import append_json, read_json, read_jsonl, write_json, write_text
from primerl_hpc.common.names import MAIN_PHASE, Kind
from primerl_hpc.launch.resume import rewind as rewinding
from primerl_hpc.launch.resume.changes import change_recipe
from primerl_hpc.launch.resume.rewind import check_step, rewind
from primerl_hpc.plan.plan import load_plan
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import COMPLETE, STABLE
from primerl_hpc.tracking.targets import SOURCES


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """An RL run of 6 steps with checkpoints of steps 2, 4 and 6."""
    run = RunDir(tmp_path / "run")
    recipe = load_recipe(
        "reverse_text/tiny",
        overrides=["max_steps=6", "scheduler={type: linear, warmup_steps: 0, decay_steps: 6}"],
    )
    plan = compile_plan(recipe.recipe, load_profile("local").profile, run_dir=str(run.root), python="python")
    write_json(run.plan, plan.model_dump(mode="json"))
    write_json(run.provenance, {"recipe_sha256": "0"})
    for step in range(1, 7):
        for parent in (run.weights, run.rollouts):
            write_text(parent / f"step_{step}" / STABLE, "")
        append_json(run.metrics("trainer"), {"step": step, "loss/mean": step})
        append_json(run.metrics("sft"), {"step": step})
        append_json(run.traces("train"), {"version": step - 1, "text": f"für {step}"})
        append_json(run.traces("eval"), {"version": step, "eval_version": step})
        if step % 2 == 0:
            state = {"traces_bytes": run.traces("train").stat().st_size}
            write_json(run.checkpoint_side(step, "orchestrator") / "state.json", state)
            write_text(run.checkpoint(step) / COMPLETE, "")
    return run


def rows_of(path: Path) -> list[dict]:
    return list(read_jsonl(path))


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_everything_after_the_step_is_moved_and_nothing_is_deleted(run: RunDir) -> None:
    before = content(run.root)
    sent = {name: 0 for name in SOURCES} | {"trainer": run.metrics("trainer").stat().st_size - 5}
    write_json(run.tracker_state("wandb"), {"number": 5, "offsets": sent})
    rewound = rewind(run, Kind.RL, 4)
    assert rewound.steps == {"checkpoints": [6], "weights": [5, 6], "deltas": [], "rollouts": [5, 6]}
    assert rewound.rows == {"metrics/trainer.jsonl": 2, "traces/train.jsonl": 2, "traces/eval.jsonl": 2}
    assert (run.latest_checkpoint(), run.stable_weights()) == (4, [1, 2, 3, 4])
    assert len(rows_of(run.metrics("sft"))) == 6  # of the warm-up phase
    assert (
        run.traces("train").stat().st_size
        == read_json(run.checkpoint_side(4, "orchestrator") / "state.json")["traces_bytes"]
    )
    assert rewound.folder is not None
    after, moved = content(run.root), content(rewound.folder)
    for name, data in before.items():
        assert after.get(name, b"") + moved.get(name, b"") == data, name
    state = read_json(run.tracker_state("wandb"))
    assert state["offsets"]["trainer"] == run.metrics("trainer").stat().st_size and state["number"] == 5
    assert not list(run.root.rglob("*.tmp"))


def test_a_rewind_that_was_killed_is_completed_by_the_next_one(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, done = rewinding.os.rename, []

    def rename_one(source: Path, target: Path) -> None:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(rename(source, target))

    with monkeypatch.context() as patch:
        patch.setattr(rewinding.os, "rename", rename_one)
        with pytest.raises(KeyboardInterrupt):
            rewind(run, Kind.RL, 2)
    assert run.latest_checkpoint() == 2 and len(rows_of(run.metrics("trainer"))) == 6
    rewind(run, Kind.RL, 2)
    assert run.stable_weights() == [1, 2] and len(rows_of(run.metrics("trainer"))) == 2
    assert rewind(run, Kind.RL, 2).folder is None
    moved = sorted(path.name for path in (run.root / "superseded").glob("*/weights/*"))
    assert moved == ["step_3", "step_4", "step_5", "step_6"]


def test_two_returns_within_a_second_keep_what_each_of_them_moved(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewinding.time, "strftime", lambda _: "now")
    first = rewind(run, Kind.RL, 4).folder
    write_text(run.weights / "step_5" / STABLE, "again")
    append_json(run.metrics("trainer"), {"step": 5, "loss/mean": 7})
    second = rewind(run, Kind.RL, 4).folder
    assert first is not None and second is not None
    for folder, mark, losses in ((first, "", [5, 6]), (second, "again", [7])):
        assert (folder / "weights" / "step_5" / STABLE).read_text() == mark
        assert [row["loss/mean"] for row in rows_of(folder / "metrics" / "trainer.jsonl")] == losses


def test_a_step_without_a_complete_checkpoint_is_refused_with_those_that_exist(run: RunDir) -> None:
    with pytest.raises(NotFoundError, match="run run has no complete checkpoint of step 3") as caught:
        check_step(run, 3)
    assert caught.value.hint == "complete checkpoints: 2, 4, 6"


def test_a_checkpoint_without_its_marker_is_refused(run: RunDir) -> None:
    (run.checkpoint(4) / COMPLETE).unlink()
    with pytest.raises(NotFoundError, match="no complete checkpoint of step 4") as caught:
        check_step(run, 4)
    assert caught.value.hint == "complete checkpoints: 2, 6"


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("--step", "3"), "no complete checkpoint of step 3"),
        (("--step", "2", "--chain", "3"), "one job is sufficient"),
        (("--step", "2", "--set", "max_steps=9", "--budget", "many"), "is not a number of hours"),
        (("--step", "2", "--set", "seed=3"), "seed cannot change at a resume"),
        (("--set", "max_steps=9", "--profile-set", "nodes=3"), "nodes cannot change between attempts"),
    ],
)
def test_a_refused_resume_changes_nothing(run: RunDir, words: tuple[str, ...], cause: str) -> None:
    before = content(run.root)
    done = CliRunner().invoke(cli, ["resume", str(run.root), *words], standalone_mode=False)
    assert isinstance(done.exception, PrimerlError) and cause in done.exception.cause
    assert content(run.root) == before


def test_a_changed_key_is_in_the_plan_and_recorded_with_the_step(run: RunDir) -> None:
    (line,) = change_recipe(run, ["max_steps=10"], 6, hint="submit a new run")
    recipe = load_plan(run).phase(MAIN_PHASE).recipe
    assert recipe.max_steps == 10 and recipe.scheduler.type == "linear"
    (change,) = json.loads(run.provenance.read_text())["changes"]
    assert (change["after_step"], change["set"]) == (6, ["max_steps=10"])
    before, after = (
        recipe.optimizer.lr / 6,
        recipe.optimizer.lr * 4 / 6,
    )  # (max_steps + 1 − step) / decay_steps
    assert line == (
        f"learning rate at step 7: {before:.3g} → {after:.3g}: the schedule 'linear' depends on max_steps"
    )
    assert change_recipe(run, ["checkpoint.interval=1"], 6, hint="") == []
    assert len(json.loads(run.provenance.read_text())["changes"]) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.name=other", "model.name cannot change at a resume"),
        ("max_steps=4", "max_steps=4: the run continues after step 6"),
        ("max_steps=many", "max_steps"),
        ("optimizer.lr=-1", "optimizer.lr"),
        ("optimizer.rate=1", "unknown key 'optimizer.rate'"),
        ("model.name=x", "model.name cannot change at a resume"),
    ],
)
def test_other_keys_and_wrong_values_leave_the_plan_unchanged(run: RunDir, change: str, words: str) -> None:
    before = content(run.root)
    with pytest.raises(ConfigError) as caught:
        change_recipe(run, [change], 6, hint="submit a new run")
    assert words in str(caught.value) and content(run.root) == before
