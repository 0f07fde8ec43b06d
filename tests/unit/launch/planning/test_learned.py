"""Plans that use the user's ledger: corrected figures, the same ledger gives the same plan, and what cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.plan.plan import PredictionRecord
from primerl_hpc.run.ledger.rows import LedgerRow
from primerl_hpc.run.ledger.store import append_rows, user_ledger
from tests.unit.launch.planning.test_forecast import H100, here, run

__all__ = ["here"]
FIXED = (
    "--set",
    "layout.inference={nodes: 1, replicas: 8}",
    "--set",
    "layout.trainer={nodes: 1, ranks: auto}",
)


def record() -> PredictionRecord:
    """The prediction in the plan of a dry run."""
    done = run("submit", "recipe.yaml", *H100, *FIXED, "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)["plan"]["prediction"]
    return PredictionRecord.model_validate(found)


def rows_of(prediction: PredictionRecord, figure: str, ratio: float) -> list[LedgerRow]:
    """Three runs of the same layout that measured ``ratio`` times the prediction."""
    value = prediction.figures[figure]
    row = LedgerRow(
        figure=figure,
        predicted=value.value,
        measured=ratio * value.value,
        unit=value.unit,
        gpu=prediction.gpu,
        family=prediction.family,
        layout=prediction.layout,
        software=prediction.software,
        time=1e9,
    )
    return [row] * 3


@pytest.mark.parametrize("figure", ["time.trainer.step", "time.engine.decode", "memory.trainer.reserved"])
def test_the_next_plan_is_corrected_by_what_three_runs_measured(here: Path, figure: str) -> None:
    before = record()
    assert before.corrections == {}
    append_rows(user_ledger(), rows_of(before, figure, 1.2))
    after = record()
    applied = after.corrections[figure]
    assert 1.15 < applied.factor < 1.2 and applied.num_rows == 3 and applied.closest == "layout"
    assert after.figures[figure].value == pytest.approx(applied.factor * before.figures[figure].value)
    assert after.figures[figure].tier == "measured"
    assert record() == after  # the same ledger gives the same plan
    if figure != "memory.trainer.reserved":
        assert after.figures["time.step"].value > before.figures["time.step"].value


@pytest.mark.parametrize("option", [["--compare"], ["--nodes", "2"]])
def test_other_layouts_are_corrected_too(here: Path, option: list[str]) -> None:
    def steps() -> list[float]:
        shown = json.loads(run("plan", "recipe.yaml", *H100, *option, "--json").stdout)
        rows = shown["layouts"] if "--compare" in option else shown
        return sorted(row["figures"]["time.step"] for row in rows)

    before, prediction = steps(), record()
    for figure in ("time.trainer.step", "time.engine.decode"):
        append_rows(user_ledger(), rows_of(prediction, figure, 1.5))
    assert steps()[0] > 1.05 * before[0]


def test_a_calibrated_node_changes_every_figure_that_rests_on_its_curves(here: Path) -> None:
    before = record()
    row = LedgerRow("hardware.gemm", 1.3, "s", before.gpu, predicted=1.0, time=1e9, source="calibrate")
    append_rows(user_ledger(), [row] * 5)
    after = record()
    assert after.figures["time.trainer.step"].value > 1.05 * before.figures["time.trainer.step"].value


def test_rows_of_another_gpu_change_nothing(here: Path) -> None:
    before = record()
    other = [LedgerRow("time.trainer.step", 2.0, "s", "A100-SXM-80GB", predicted=1.0, time=1e9)]
    append_rows(user_ledger(), other)
    assert record() == before


def test_a_broken_ledger_is_a_warning(here: Path) -> None:
    before = record()
    user_ledger().parent.mkdir(parents=True, exist_ok=True)
    user_ledger().write_text("not json\n")
    done = run("submit", "recipe.yaml", *H100, *FIXED, "--dry-run", "--json")
    assert done.exit_code == 0 and "ledger.jsonl:1: not a row of a ledger" in done.stderr
    assert record() == before
