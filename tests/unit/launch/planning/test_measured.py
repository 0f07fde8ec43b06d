"""Commands record what ended attempts measured of their plans' predictions; without one they write nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from primerl_hpc.common.files import append_json, write_json
from primerl_hpc.common.names import Role
from primerl_hpc.launch.planning.advice import refresh
from primerl_hpc.observe.status.predicted import sentence, table_rows
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.plan.plan import AppliedCorrection, PredictedFigure, PredictionRecord, load_plan
from primerl_hpc.run.ledger.store import read_rows, user_ledger
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import TOY_RECIPE, make_plan, process_plan
from tests.support.stranger import as_stranger


def figure(value: float, unit: str = "s") -> PredictedFigure:
    return PredictedFigure(value=value, low=0.8 * value, high=1.2 * value, unit=unit, tier="table")


RECORD = PredictionRecord(
    gpu="H100-SXM",
    engine_gpu="L40S",
    family="qwen3",
    layout="8 ranks",
    software={"torch": "2.9.1", "vllm": "0.31.0"},
    figures={
        "time.step": figure(40.0),
        "time.trainer.step": figure(20.0),
        "time.weight_update": figure(2.0),
        "idle.trainer": figure(0.4, "1"),
        "memory.trainer.reserved": figure(70 * 2.0**30, "B"),
        "kv.tokens": figure(1e6, "tokens"),
    },
    corrections={
        "time.trainer.step": AppliedCorrection(factor=1.25, deviation=0.1, num_rows=2, closest="family")
    },
)


def run_with(
    folder: Path, prediction: PredictionRecord | None, steps: int = 6, state: str = "done"
) -> RunDir:
    """A run whose trainer wrote ``steps`` rows of 44 s, the first of which took much longer."""
    plan = make_plan(folder, TOY_RECIPE, processes=[process_plan(Role.TRAINER)])
    run = RunDir(folder)
    write_json(run.plan, plan.model_copy(update={"prediction": prediction}).model_dump(mode="json"))
    write_json(run.state, {"attempt": 1, "state": state})
    for step in range(1, steps + 1):
        seconds = 44.0 if step > 1 else 400.0
        row = {"step": step, "attempt": 1, "time": 1e9 + step, "time/step": seconds}
        compute = {"time/forward_backward": 0.5 * seconds, "time/optimizer": 0.0}
        trainer = {"time/wait_for_batch": 0.25 * seconds, "perf/peak_memory": 63.0, **compute}
        append_json(run.metrics("trainer"), {**row, **trainer})
        append_json(run.metrics("orchestrator"), {**row, "time/weight_update": 3.0})
    return run


def test_each_measured_figure_is_recorded_once_for_the_run_and_for_the_user(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", RECORD)
    refresh(run)
    rows = {row.figure: row for row in read_rows(run.ledger, warn=pytest.fail)}
    assert list(rows.values()) == read_rows(user_ledger(), warn=pytest.fail)
    assert rows.keys() == RECORD.figures.keys() - {"kv.tokens"}
    assert (rows["time.step"].predicted, rows["time.step"].measured) == (40.0, 44.0)
    assert rows["memory.trainer.reserved"].measured == 63 * 2**30
    # the formula's value, without the correction that this plan contained
    assert (rows["time.trainer.step"].predicted, rows["time.trainer.step"].measured) == (16.0, 22.0)
    assert rows["time.weight_update"].gpu == "L40S" and rows["time.trainer.step"].gpu == "H100-SXM"
    assert rows["time.step"].software["torch"] == "2.9.1" and rows["time.step"].family == "qwen3"
    before = (run.ledger.read_bytes(), user_ledger().read_bytes())
    refresh(run)
    assert (run.ledger.read_bytes(), user_ledger().read_bytes()) == before


@pytest.mark.usefixtures("no_locks")
def test_figures_are_recorded_on_a_filesystem_without_locks(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", RECORD)
    refresh(run)
    rows = read_rows(run.ledger, warn=pytest.fail)
    assert rows and rows == read_rows(user_ledger(), warn=pytest.fail)


def test_an_attempt_is_recorded_when_it_has_ended(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", RECORD, state="running")
    refresh(run)
    assert not run.ledger.exists()
    write_json(run.state, {"attempt": 2, "state": "running"})
    refresh(run)
    assert {row.attempt for row in read_rows(run.ledger, warn=pytest.fail)} == {1}


@pytest.mark.parametrize(("prediction", "steps"), [(None, 6), (RECORD, 2), (RECORD, 0)])
def test_a_run_without_a_prediction_or_with_too_few_steps_records_nothing(
    tmp_path: Path, prediction: PredictionRecord | None, steps: int
) -> None:
    run = run_with(tmp_path / "run", prediction, steps)
    refresh(run)
    assert not run.ledger.exists() and not user_ledger().exists()


def test_a_ledger_that_cannot_be_written_is_a_warning(
    tmp_path: Path, own_state_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_state_home.rmdir()
    own_state_home.write_text("a file where the state home should be")
    run = run_with(tmp_path / "run", RECORD)
    refresh(run)
    assert read_rows(run.ledger, warn=pytest.fail)
    assert str(own_state_home) in capsys.readouterr().err


def test_metrics_that_cannot_be_read_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with(tmp_path / "run", RECORD)
    run.metrics("trainer").unlink()
    run.metrics("trainer").mkdir()
    refresh(run)
    assert "trainer.jsonl" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
def test_the_run_of_another_user_is_left_alone(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", RECORD)
    run.control.chmod(0o755)
    as_stranger(lambda: refresh(run))
    assert not run.ledger.exists() and not run.advice.exists()


def test_status_and_report_show_predicted_against_measured(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", RECORD, steps=30)
    shown = {comparison.figure: comparison for comparison in take_snapshot(run).comparisons}
    assert sentence(shown["time.step"]) == "step: 40.00 s predicted, 44.00 s measured (+10 %)"
    assert sentence(shown["memory.trainer.reserved"]).endswith(
        "70.0 GiB predicted, 63.0 GiB measured (-10 %)"
    )
    assert sentence(shown["idle.trainer"]).endswith(
        "40 % predicted, 25 % measured (-15 points, outside the predicted interval)"
    )
    rows = table_rows(tuple(shown.values()))
    assert ("step", "40.00 s", "32.00 s – 48.00 s", "44.00 s", "+10 %") in rows
    assert (
        json.loads(json.dumps(take_snapshot(run).as_json()))["predicted"][0]["figure"]
        == "memory.trainer.reserved"
    )
    assert run_with(tmp_path / "cpu", None) and take_snapshot(RunDir(tmp_path / "cpu")).comparisons == ()


def test_the_prediction_is_part_of_the_plan(tmp_path: Path) -> None:
    assert load_plan(run_with(tmp_path / "run", RECORD)).prediction == RECORD
