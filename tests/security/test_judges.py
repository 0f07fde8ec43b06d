"""A judge without a base_url is rejected at submission and by its environment server: it would use a third party."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.names import Role
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import make_plan, process_plan, run_role, unusable_model
from tests.unit.cli.test_cli import primerl

pytest.importorskip("verifiers")

THIRD_PARTY = "would be sent to a third party"
RUBRIC = {"task": {"judges": [{"id": "reference"}]}}
PACKAGE = """\
import verifiers.v1 as vf

class TaskConfig(vf.TaskConfig):
    judge: vf.JudgeConfig = vf.JudgeConfig()

class Data(vf.TaskData):
    answer: str = ""

class MyTask(vf.Task[Data, vf.State, TaskConfig]):
    pass

class Config(vf.TasksetConfig):
    task: TaskConfig = TaskConfig()

class Judged(vf.Taskset[MyTask, Config]):
    def load(self):
        yield MyTask(Data(idx=0, prompt="a", answer="b"), self.config.task)

__all__ = ["Judged"]
"""


def recipe_with(environment: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "kind": "rl",
        "name": "judged",
        "model": {"name": "./model", "renderer": {"name": "qwen3"}},
        "seq_len": 64,
        "max_steps": 3,
        "rollouts": {"batch_size": 4, "group_size": 2, "sampling": {"max_tokens": 16}},
        "environments": {"train": [environment]},
        **more,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    unusable_model(tmp_path / "model")
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "judged_task.py").write_text(PACKAGE)
    return tmp_path


def submit(folder: Path, recipe: dict[str, Any], *words: str) -> Any:
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    import os

    from tests.support.helpers import ROOT

    path = os.pathsep.join((str(ROOT), str(folder / "packages")))
    return primerl(
        *("submit", "recipe.yaml", "-p", "local", "--dry-run", "--run-dir", "run", *words),
        cwd=folder,
        PYTHONPATH=path,
    )


@pytest.mark.parametrize(
    "environment",
    [{"id": "reverse-text", "args": RUBRIC}, {"id": "judged-task"}],
    ids=["plugged", "declared"],
)
def test_submit_refuses_a_judge_without_a_base_url(folder: Path, environment: dict[str, Any]) -> None:
    done = submit(folder, recipe_with(environment))
    assert done.returncode == ExitCode.CONFIG, done.stderr
    sentence = done.stderr.splitlines()[-1]
    assert f"environment {environment['id']}" in sentence and THIRD_PARTY in sentence
    assert "judge: {model: {name: …}}" in sentence and "base_url" in sentence  # the hint
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("environment", "more"),
    [
        ({"id": "reverse-text", "args": RUBRIC}, {"judge": {"model": {"name": "./model"}}}),
        ({"id": "judged-task", "args": {"task": {"judge": {"base_url": "http://mine/v1"}}}}, {}),
    ],
    ids=["judge of the recipe", "address"],
)
def test_submit_accepts_a_judge_with_a_base_url(folder: Path, environment: Any, more: dict[str, Any]) -> None:
    done = submit(folder, recipe_with(environment, **more), "--json")
    assert THIRD_PARTY not in done.stderr and done.returncode == 0, done.stderr


def test_an_environment_server_refuses_a_judge_without_a_base_url(tmp_path: Path) -> None:
    """The check at startup covers submissions from an interpreter without verifiers."""
    run = RunDir(tmp_path / "run")
    environment = {"id": "reverse-text", "args": RUBRIC}
    make_plan(run.root, recipe_with(environment), processes=[process_plan(Role.ENV_SERVER)])
    code, log = run_role(run, "main", "env_server-0", HOME=str(tmp_path))
    assert code == ExitCode.CONFIG, log
    assert THIRD_PARTY in log and "environment reverse-text" in log
    assert not run.endpoint("env_server-0").exists()
