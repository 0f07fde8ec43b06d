"""Figures: intervals of sums, products and quotients, tiers, and what `--why` finds."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.plan.predict.figure import Figure, Tier, add, divide, estimate, exact, largest, multiply

POSITIVE = st.floats(1e-6, 1e12)
FACTORS = st.floats(1, 4)


@st.composite
def figures(draw: st.DrawFn) -> list[Figure]:
    values = draw(st.lists(st.tuples(st.one_of(st.just(0.0), POSITIVE), FACTORS), min_size=1, max_size=6))
    return [
        estimate(f"part.{index}", value, factor, "B", "f") for index, (value, factor) in enumerate(values)
    ]


@given(figures())
def test_the_interval_of_a_sum_lies_within_the_sums_of_all_ends(parts):
    total = add("total", "B", parts)
    assert total.value == pytest.approx(sum(part.value for part in parts))
    assert total.low >= sum(part.low for part in parts) * (1 - 1e-9)
    assert total.high <= sum(part.high for part in parts) * (1 + 1e-9)
    widest = max(part.high - part.value for part in parts)
    assert total.high - total.value >= widest * (1 - 1e-6) - total.value * 1e-9


@given(POSITIVE, FACTORS, POSITIVE, FACTORS)
def test_widths_of_products_and_quotients_add_in_quadrature(one, wide, other, narrow):
    first, second = estimate("a", one, wide, "s", "f"), estimate("b", other, narrow, "s", "f")
    expected = math.hypot(math.log(wide), math.log(narrow))
    for made in (multiply("c", "s", [first, second]), divide("c", "s", first, second)):
        assert math.log(made.high / made.value) == pytest.approx(expected, abs=1e-9)
        assert math.log(made.value / made.low) == pytest.approx(expected, abs=1e-9)


def test_the_interval_of_a_product_holds_80_percent_of_log_normal_draws():
    draws = random.Random(7)
    parts = [estimate("a", 3.0, 1.3, "B", "f"), estimate("b", 5.0, 1.6, "B", "f")]
    made = multiply("c", "B", parts)
    sigmas = [part.log_widths[1] / 1.2816 for part in parts]  # the 90th percentile of a normal distribution
    inside = 0
    for _ in range(20_000):
        value = math.prod(p.value * math.exp(draws.gauss(0, s)) for p, s in zip(parts, sigmas, strict=True))
        inside += made.low <= value <= made.high
    assert inside / 20_000 == pytest.approx(0.8, abs=0.01)


def test_the_worst_tier_of_the_inputs_counts():
    measured = exact("a", 1, "B", "f", tier=Tier.MEASURED)
    table = exact("b", 1, "B", "f", tier=Tier.TABLE)
    assert add("c", "B", [measured, table]).tier == Tier.TABLE
    assert largest("c", "B", [measured]).tier == Tier.MEASURED


def test_inputs_are_found_by_name_and_written_as_json():
    inner = exact("memory.trainer.weights", 8, "B", "parameters × 4", {"parameters": 2}, source="a page")
    total = add("memory.trainer", "B", [add("memory.trainer.states", "B", [inner])])
    assert total.find("memory.trainer.weights") is inner
    assert total.find("memory.engine") is None
    written = json.loads(json.dumps(total.as_dict()))
    states = written["inputs"]["memory.trainer.states"]
    assert states["inputs"]["memory.trainer.weights"]["source"] == "a page"
    assert written["tier"] == "formula"


@pytest.mark.parametrize("ends", [(2, 1, 3), (1, 3, 2), (-1, 1, 2), (1, math.nan, 2), (1, 2, math.inf)])
def test_an_interval_without_its_value_is_refused(ends):
    low, value, high = ends
    with pytest.raises(ValueError, match="does not contain"):
        Figure("a", value, low, high, "B", "f")


def test_units_and_names_of_parts_are_checked():
    with pytest.raises(ValueError, match="is in s"):
        add("total", "B", [exact("a", 1, "s", "f")])
    with pytest.raises(ValueError, match="same name"):
        add("total", "B", [exact("a", 1, "B", "f"), exact("a", 2, "B", "f")])


def test_the_largest_of_figures_has_the_largest_ends():
    made = largest("c", "s", [estimate("a", 2, 2, "s", "f"), estimate("b", 3, 1.1, "s", "f")])
    assert (made.low, made.value, made.high) == (pytest.approx(3 / 1.1), 3, 4)
