"""Predicted durations against published ones: errors stay below what `tools/bench/planner_rows.py` reports today."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tools.bench import planner_times

ROOT = Path(__file__).resolve().parents[5]


@pytest.fixture(scope="module")
def bench():
    return planner_times


@pytest.fixture(scope="module")
def rows(bench):
    return bench.read(ROOT / "docs" / "measurements" / "planner_rows.csv")


def test_decode_steps_of_published_engines(bench, rows):
    found = bench.summary(engine.case for engine in bench.decode_rows(rows))
    assert found["rows"] == 61  # every row of a known family has a prediction
    assert found["median"] <= 0.095
    assert found["within_20"] >= 0.70
    assert 0.72 <= found["coverage_80"] <= 0.88


def test_decode_steps_of_models_outside_the_fit(bench, rows):
    held_out = [engine.case for engine in bench.decode_rows(rows) if not engine.case.is_fitted]
    assert len(held_out) == 23
    assert bench.summary(held_out)["median"] <= 0.14


def test_times_to_the_first_token_of_engines_with_few_sequences(bench, rows):
    numbers = bench.summary(bench.first_token_rows(rows))
    assert numbers["rows"] == 23
    assert numbers["median"] <= 0.19
    assert abs(numbers["bias"]) < 0.02  # the factor is the median of these rows
    assert 0.75 <= numbers["coverage_80"] <= 0.87


def test_steps_of_published_trainers(bench, rows):
    """Mixtures on B200 ran without grouped products: they are not counted."""
    found = [case for case in bench.trainer_cases(rows) if case.group != "B200, mixtures"]
    assert len(found) == 31
    numbers = bench.summary(found)
    assert numbers["median"] <= 0.04
    assert numbers["mean"] <= 0.085
    assert 0.75 <= numbers["coverage_80"] <= 0.92


def test_steps_of_all_published_trainers(bench, rows):
    assert bench.summary(bench.trainer_cases(rows))["median"] <= 0.06


def test_weight_updates(bench, rows):
    found = list(bench.transfer_cases(rows))
    files = [case for case in found if case.group == "files, one writer"]
    assert len(files) == 6
    assert bench.summary(files)["median"] <= 0.05
    assert bench.summary(found)["coverage_80"] >= 0.75


def test_end_to_end_steps_of_engines_and_trainer_in_turns(bench, rows, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "bench"))
    found = list(importlib.import_module("planner_steps").step_rows(rows))
    assert len(found) == 5
    assert bench.summary(found)["median"] <= 0.19
