"""Corrections from the ledger: shrunk, bounded, by GPU, family, layout and version, independent of the order."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.plan.predict.figure import Tier, estimate
from primerl_hpc.plan.predict.ledger import (
    BOUNDS,
    DEVIATIONS,
    HALF_LIFE_DAYS,
    LedgerKey,
    correct,
    corrections,
    record_prediction,
)
from primerl_hpc.run.ledger.rows import LedgerRow

NOW = 1_800_000_000.0
DAY = 86_400.0
STEP = "time.trainer.step"
KEY = LedgerKey("H100-SXM", "qwen3", "16 ranks", {"torch": "2.9.1", "vllm": "0.31.0"})


def row(ratio: float, **changes: object) -> LedgerRow:
    values = {
        "figure": STEP,
        "measured": 10.0 * ratio,
        "predicted": 10.0,
        "unit": "s",
        "gpu": "H100-SXM",
        "family": "qwen3",
        "layout": "16 ranks",
        "software": {"torch": "2.9.1"},
        "time": NOW,
    }
    return LedgerRow(**(values | changes))  # type: ignore[arg-type]


def factor(*rows: LedgerRow, key: LedgerKey = KEY, figure: str = STEP) -> float:
    found = corrections(rows, key, now=NOW)
    return found[figure].factor if figure in found else 1.0


def test_no_rows_are_no_correction() -> None:
    assert corrections([], KEY, now=NOW) == {}


def test_one_row_moves_the_factor_most_of_the_way_and_more_rows_the_rest() -> None:
    factors = [factor(*[row(1.5)] * count) for count in (1, 3, 30)]
    assert 1.3 < factors[0] < factors[1] < factors[2] < 1.5
    assert factors[2] == pytest.approx(1.5, rel=0.01)


def test_the_posterior_of_a_single_cell_is_the_closed_form() -> None:
    """One layout of one family: the layout's effect is the sum of three normal effects, observed with noise."""
    prior = sum(DEVIATIONS[level] ** 2 for level in ("gpu", "family", "layout"))
    noise = DEVIATIONS["noise"] ** 2
    for count in (1, 4):
        found = corrections([row(1.4)] * count, KEY, now=NOW)[STEP]
        expected = math.log(1.4) * prior / (prior + noise / count)
        assert math.log(found.factor) == pytest.approx(expected)
        variance = 1 / (1 / prior + count / noise) + noise
        assert found.deviation == pytest.approx(math.sqrt(variance))


def test_rows_of_the_same_layout_count_more_than_those_of_the_family_and_the_gpu() -> None:
    same = row(1.5)
    family, gpu = replace(same, layout="8 ranks"), replace(same, layout="8 ranks", family="llama")
    assert factor(same) > factor(family) > factor(gpu) > 1.1
    closest = [corrections([each], KEY, now=NOW)[STEP].closest for each in (same, family, gpu)]
    assert closest == ["layout", "family", "gpu"]
    widths = [corrections([each], KEY, now=NOW)[STEP].deviation for each in (same, family, gpu)]
    assert widths == sorted(widths)


def test_a_new_layout_of_a_known_family_starts_from_the_family() -> None:
    others = [row(1.4, layout=f"{ranks} ranks") for ranks in (2, 4, 8) for _ in range(3)]
    assert 1.3 < factor(*others) < 1.4


def test_another_gpu_and_another_version_teach_nothing() -> None:
    assert corrections([row(1.5, gpu="A100-SXM-80GB")], KEY, now=NOW) == {}
    assert corrections([row(1.5, software={"torch": "2.8.0"})], KEY, now=NOW) == {}
    # the trainer's time does not depend on the version of vLLM
    assert corrections([row(1.5, software={"torch": "2.9.1", "vllm": "0.30.0"})], KEY, now=NOW)


def test_figures_of_engines_use_the_engines_gpu() -> None:
    key = replace(KEY, engine_gpu="L40S")
    engine = row(1.2, figure="time.engine.decode", gpu="L40S", software={"vllm": "0.31.0"})
    assert factor(engine, key=key, figure="time.engine.decode") > 1.1
    assert factor(engine, figure="time.engine.decode") == 1.0


def test_older_rows_count_less() -> None:
    new = factor(row(1.5), row(1.0, time=NOW - 4 * HALF_LIFE_DAYS * DAY))
    both = factor(row(1.5), row(1.0))
    assert new > both
    assert factor(row(1.5, time=NOW + DAY)) == factor(row(1.5))  # a clock that is ahead


def test_shares_and_rows_without_a_prediction_are_not_corrections() -> None:
    rows = [row(1.5, figure="idle.trainer"), row(1.5, predicted=None), row(0.0), row(1.5, predicted=0.0)]
    assert corrections(rows, KEY, now=NOW) == {}


ratios = st.floats(min_value=1e-3, max_value=1e3)
cells = st.tuples(ratios, st.sampled_from(["qwen3", "llama"]), st.sampled_from(["16 ranks", "8 ranks"]))


@given(st.lists(cells, min_size=1, max_size=12), st.floats(min_value=0, max_value=5000))
def test_a_factor_is_bounded_between_its_rows_and_one_and_independent_of_their_order(
    found: list[tuple[float, str, str]], age_days: float
) -> None:
    rows = [row(ratio, family=family, layout=layout) for ratio, family, layout in found]
    now = NOW + age_days * DAY
    result = corrections(rows, KEY, now=now)[STEP]
    assert BOUNDS[0] <= result.factor <= BOUNDS[1]
    low, high = min(1.0, *(ratio for ratio, *_ in found)), max(1.0, *(ratio for ratio, *_ in found))
    assert low - 1e-9 <= result.factor <= high + 1e-9
    assert 0 < result.deviation <= math.sqrt(sum(value**2 for value in DEVIATIONS.values())) + 1e-9
    again = corrections(rows[::-1], KEY, now=now)[STEP]
    assert again.factor == pytest.approx(result.factor) and again.deviation == pytest.approx(result.deviation)


def test_a_corrected_figure_names_the_correction_and_its_interval_does_not_grow() -> None:
    figure = estimate(STEP, 10.0, 1.5, "s", "FLOP / rate", {"FLOP": 1e15}, source="table")
    correction = corrections([row(1.2)] * 3, KEY, now=NOW)[STEP]
    found = correct(figure, correction)
    assert found.value == pytest.approx(10 * correction.factor)
    assert found.high / found.value < 1.5 and found.value / found.low < 1.5
    assert found.tier == Tier.MEASURED and found.inputs["uncorrected"] == 10.0
    assert "3 rows, closest: same layout" in found.source and "× correction" in found.formula
    assert correct(figure, None) is figure
    nothing = estimate(STEP, 0.0, 1.5, "s", "none")
    assert correct(nothing, correction) is nothing


def test_a_plan_records_the_corrections_of_its_figures_only() -> None:
    figure = estimate(STEP, 10.0, 1.5, "s", "FLOP / rate")
    applied = corrections([row(1.2), row(1.1, figure="memory.trainer.reserved", unit="B")], KEY, now=NOW)
    record = record_prediction([correct(figure, applied[STEP])], KEY, applied)
    assert set(record.figures) == set(record.corrections) == {STEP}
    assert record.corrections[STEP].factor == applied[STEP].factor
    assert record.engine_gpu == "H100-SXM"
    assert type(record).model_validate_json(record.model_dump_json()) == record
