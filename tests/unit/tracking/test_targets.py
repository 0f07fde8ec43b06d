"""Targets with packages of their own: a missing package is one sentence, and each row is written once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.files import append_json
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.metrics import MetricsWriter
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.tracking.relay import Relay

PACKAGES = {"mlflow": "mlflow-skinny", "trackio": "trackio", "tensorboard": "tensorboard"}


def recipe_of(tmp_path: Path) -> Recipe:
    uri = (
        f"sqlite:///{tmp_path}/mlflow.db"
        if importlib.util.find_spec("sqlalchemy")
        else f"file://{tmp_path}/mlflow"
    )
    tracking = f"tracking={{mlflow: {{uri: '{uri}', log_extras: {{interval: 1}}}}, trackio: {{}}, tensorboard: {{}}}}"
    return load_recipe("reverse_text/tiny", overrides=[tracking, "max_steps=3"]).recipe


def send(run: RunDir, recipe: Recipe, target: str) -> Relay:
    relay = Relay(run, recipe, target, Event())
    relay.send(is_last=True)
    relay.finish()
    return relay


def write(run: RunDir, step: int) -> None:
    append_json(
        run.traces("train"), {"env": "e", "task": "t", "step": step, "reward": 1.0, "completion": "c"}
    )
    MetricsWriter(run.metrics("orchestrator")).write(step, {"reward/mean": float(step), "avg@4": 1.0})


@pytest.mark.parametrize("target", PACKAGES)
def test_a_missing_package_is_one_sentence_with_the_command_that_installs_it(
    tmp_path: Path, target: str
) -> None:
    if importlib.util.find_spec(target) is not None:
        pytest.skip(f"{target} is installed")
    with pytest.raises(ConfigError, match=f"pip install '{PACKAGES[target]}'"):
        send(RunDir(tmp_path / "run"), recipe_of(tmp_path), target)


def test_mlflow_continues_its_run_with_new_rows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)  # MLflow writes artifacts of a database to ./mlruns
    run, recipe = RunDir(tmp_path / "run"), recipe_of(tmp_path)
    write(run, 1)
    send(run, recipe, "mlflow")
    before = run.tracker_state("mlflow").read_text()
    write(run, 2)
    send(run, recipe, "mlflow")
    run.tracker_state("mlflow").write_text(
        before
    )  # as if the process was killed before it noted what it had sent
    write(run, 3)
    relay = send(run, recipe, "mlflow")
    assert recipe.tracking.mlflow is not None
    client = mlflow.MlflowClient(recipe.tracking.mlflow.uri)
    (found,) = client.search_runs([client.get_experiment_by_name("primerl-hpc").experiment_id])
    history = client.get_metric_history(found.info.run_id, "orchestrator/reward/mean")
    assert [(entry.step, entry.value) for entry in history] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert "orchestrator/avg_4" in found.data.metrics and relay.stream.sent == 6
    assert [file.path for file in client.list_artifacts(found.info.run_id, "samples")] == [
        f"samples/step_{step}.json" for step in (1, 2, 3)
    ]


def test_tensorboard_has_each_row_once_over_attempts(tmp_path: Path) -> None:
    reader: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run, recipe = RunDir(tmp_path / "run"), recipe_of(tmp_path)
    for step in (1, 2):
        write(run, step)
        send(run, recipe, "tensorboard")
    events = reader.EventAccumulator(str(run.root / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("orchestrator/reward/mean")] == [
        (1, 1),
        (2, 2),
    ]


def test_trackio_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    run, recipe = RunDir(tmp_path / "run"), recipe_of(tmp_path)
    for step in (1, 2):
        write(run, step)
        assert send(run, recipe, "trackio").stream.sent == step
    assert list((tmp_path / "trackio").glob("*"))
