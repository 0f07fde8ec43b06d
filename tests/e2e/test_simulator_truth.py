"""The simulator against a run with an engine and a trainer of known speed; tools/bench/simulator_truth.py has six."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.helpers import ROOT

sys.path.insert(0, str(ROOT / "tools" / "bench"))

from simulator_truth import Overheads, TruthLayout, measured, simulated

SMALL = TruthLayout(
    "small",
    engines=1,
    batch_size=8,
    max_in_flight=8,
    window=1,
    mean_tokens=60.0,
    cv=0.0,
    trainer_s=2.0,
    pause_s=0.1,
)
"""Bound by the trainer: delays of a busy machine are hidden by its two seconds."""
STEPS = 6
OVERHEADS = Overheads(rollout_s=0.2, deliver_s=0.2)


@pytest.mark.slow
def test_a_real_run_is_as_long_and_as_stale_as_its_simulation(work: Path, tmp_path: Path) -> None:
    model = work / "outputs" / "tiny" / "model"
    real = measured(SMALL, model, STEPS, seed=0, folder=tmp_path / "small")
    figures = simulated(SMALL, OVERHEADS, STEPS)
    assert abs(figures["step_s"] / real["step_s"] - 1) < 0.4, (figures, real)
    assert abs(figures["trainer_idle"] - real["trainer_idle"]) < 0.3, (figures, real)
    assert abs(figures["staleness"] - real["staleness"]) < 0.5, (figures, real)
