"""The rules of the concurrency controller, one poll at a time: thresholds, sizes of changes, waits between them.

test_concurrency_simulated runs it on a simulated fleet.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl_hpc.orchestrator.scheduling.concurrency import (
    Concurrency,
    ConcurrencyDecision,
    LimitChange,
    Load,
)
from primerl_hpc.recipe.schema.rollout import AdaptiveConcurrency


def controller(start: int = 8, ceiling: int = 1024) -> Concurrency:
    return Concurrency(AdaptiveConcurrency(), start=start, ceiling=ceiling)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 4),
            st.floats(0, 1),
            st.floats(0, 500),
            st.floats(0, 500),
            st.floats(0, 1e6),
            st.integers(0, 600),
            st.integers(0, 600),
        ),
        max_size=80,
    ),
    st.integers(1, 2000),
    st.integers(1, 64),
    st.integers(1, 512),
)
@settings(max_examples=200)
def test_the_limit_stays_in_its_bounds_for_any_load(looks, start, low, ceiling):
    made = Concurrency(AdaptiveConcurrency(min=low), start=start, ceiling=ceiling)
    for engines, usage, running, waiting, preemptions, in_flight, finished in looks:
        before = made.limit
        load = Load(engines, usage, running, waiting, preemptions)
        decision = made.observe(load, in_flight=in_flight, finished=finished)
        assert min(low, ceiling) <= decision.limit <= ceiling
        assert decision.limit == made.limit
        assert 0 <= decision.cancel <= max(0, in_flight - decision.limit)
        match decision.verdict:
            case LimitChange.GROW:
                assert before < decision.limit <= max(before + 1, before * 2)
            case LimitChange.HOLD:
                assert decision == ConcurrencyDecision(LimitChange.HOLD, before)
            case _:
                assert decision.limit <= before


def quiet(**changes) -> Load:
    return Load(
        **{"num_engines": 1, "kv_usage": 0.7, "running": 50, "waiting": 0, "preemptions": 0} | changes
    )


def test_a_full_cache_takes_the_youngest_back_and_waits_for_the_effect():
    made = controller(start=100)
    decision = made.observe(quiet(kv_usage=0.98), in_flight=100, finished=0)
    assert decision == ConcurrencyDecision(LimitChange.CUT, 71, cancel=29)
    for _ in range(5):
        assert made.observe(quiet(kv_usage=0.98), in_flight=71, finished=0).verdict is LimitChange.HOLD
    assert made.observe(quiet(kv_usage=0.98), in_flight=71, finished=0).verdict is LimitChange.CUT


def test_waiting_requests_do_not_count_as_cache_usage():
    decision = controller(start=100).observe(
        quiet(kv_usage=1.0, running=50, waiting=50), in_flight=100, finished=0
    )
    assert decision == ConcurrencyDecision(LimitChange.CUT, 35, cancel=65)


def test_a_cache_that_fills_up_is_drained_without_taking_anything_back():
    made = controller(start=100)
    decision = made.observe(quiet(kv_usage=0.85), in_flight=100, finished=100)
    assert decision == ConcurrencyDecision(LimitChange.TRIM, 82, cancel=0)
    for in_flight in (100, 90, 83):  # still draining, whatever finishes
        decision = made.observe(quiet(kv_usage=0.9), in_flight=in_flight, finished=200)
        assert decision.verdict is LimitChange.HOLD


def test_many_preemptions_shrink_the_limit_and_few_or_a_restarted_engines_counter_do_not():
    made = controller(start=100)
    made.observe(quiet(preemptions=50), in_flight=100, finished=100)
    assert made.observe(quiet(preemptions=3), in_flight=100, finished=0).verdict is LimitChange.HOLD
    assert made.observe(quiet(preemptions=8), in_flight=100, finished=0).verdict is LimitChange.HOLD
    assert made.observe(quiet(preemptions=9), in_flight=100, finished=0).limit == 80


def test_an_engine_that_misses_a_look_brings_no_preemptions_back():
    made = controller(start=100)
    for engines, preemptions in ((2, 500), (1, 200), (2, 501)):
        load = quiet(num_engines=engines, preemptions=preemptions)
        assert made.observe(load, in_flight=100, finished=100).verdict is LimitChange.HOLD


def test_only_a_queue_that_stays_shrinks_the_limit():
    made = controller(start=80)
    for _ in range(5):
        assert made.observe(quiet(waiting=30), in_flight=80, finished=0).verdict is LimitChange.HOLD
    assert made.observe(quiet(waiting=30), in_flight=80, finished=0).limit == 62


def test_it_grows_only_after_a_turnover_with_every_permit_used():
    made = controller(start=100)
    easy = quiet(kv_usage=0.3)
    assert made.observe(easy, in_flight=100, finished=99).verdict is LimitChange.HOLD
    assert made.observe(easy, in_flight=80, finished=1).verdict is LimitChange.HOLD
    assert made.observe(easy, in_flight=100, finished=0) == ConcurrencyDecision(LimitChange.GROW, 125)
    assert made.observe(easy, in_flight=125, finished=100).verdict is LimitChange.HOLD


def test_no_engine_no_growth():
    made = controller(start=10)
    nobody = Load(0, 0.0, 0, 0, 0)
    assert made.observe(nobody, in_flight=10, finished=100).verdict is LimitChange.HOLD


# -- thresholds ------------------------------------------------------------------------------------


def verdict_of(made: Concurrency, load: Load, *, in_flight: int = 100, finished: int = 100) -> LimitChange:
    return made.observe(load, in_flight=in_flight, finished=finished).verdict


@pytest.mark.parametrize(
    ("usage", "verdict"),
    [
        (0.96, LimitChange.CUT),
        (0.95, LimitChange.TRIM),
        (0.81, LimitChange.TRIM),
        (0.8, LimitChange.HOLD),
        (0.6, LimitChange.HOLD),
        (0.59, LimitChange.GROW),
    ],
)
def test_the_cache_usage_decides_in_bands(usage: float, verdict: LimitChange) -> None:
    assert verdict_of(controller(start=100), quiet(kv_usage=usage)) is verdict


@pytest.mark.parametrize(("usage", "limit"), [(0.59, 125), (0.3, 125), (0.29, 200)])
def test_a_nearly_empty_cache_doubles_the_limit(usage: float, limit: int) -> None:
    made = controller(start=100)
    assert made.observe(quiet(kv_usage=usage), in_flight=100, finished=100).limit == limit


@pytest.mark.parametrize(
    ("load", "in_flight", "verdict"),
    [
        (quiet(kv_usage=0.5, waiting=2.5), 100, LimitChange.GROW),
        (quiet(kv_usage=0.5, waiting=2.6), 100, LimitChange.HOLD),
        (quiet(kv_usage=0.5), 90, LimitChange.GROW),
        (quiet(kv_usage=0.5), 89, LimitChange.HOLD),
    ],
)
def test_the_limit_grows_only_while_nothing_waits_and_most_permits_are_used(
    load: Load, in_flight: int, verdict: LimitChange
) -> None:
    assert verdict_of(controller(start=100), load, in_flight=in_flight) is verdict


def test_growth_is_at_least_one_rollout_and_ends_at_the_ceiling() -> None:
    for start, limit in ((1, 2), (3, 4), (4, 5), (1023, 1024)):
        made = Concurrency(AdaptiveConcurrency(min=1), start=start, ceiling=1024)
        assert made.observe(quiet(kv_usage=0.5), in_flight=start, finished=start).limit == limit
    made = controller(start=1024)
    decision = made.observe(quiet(kv_usage=0.1), in_flight=1024, finished=1024)
    assert decision == ConcurrencyDecision(LimitChange.HOLD, 1024)


def test_a_short_peak_of_usage_is_smoothed_and_a_long_one_cuts() -> None:
    """A quarter of the newest poll counts: from 0.7 to above 0.95 takes seven polls at 1.0."""
    made = controller(start=100)
    verdict_of(made, quiet(kv_usage=0.7), finished=0)
    verdicts = [verdict_of(made, quiet(kv_usage=1.0), finished=0) for _ in range(7)]
    assert verdicts == [LimitChange.HOLD] * 6 + [LimitChange.CUT]


def test_trimming_uses_a_slower_average() -> None:
    """Eight hundredths of the newest poll count: from 0.7 to above 0.8 takes five polls at 1.0."""
    made = controller(start=100)
    verdict_of(made, quiet(kv_usage=0.7), finished=0)
    verdicts = [verdict_of(made, quiet(kv_usage=1.0)) for _ in range(5)]
    assert verdicts == [LimitChange.HOLD] * 4 + [LimitChange.TRIM]


def test_after_a_cut_the_averages_start_over() -> None:
    made = controller(start=100)
    assert verdict_of(made, quiet(kv_usage=1.0), finished=0) is LimitChange.CUT
    for _ in range(9):
        assert verdict_of(made, quiet(kv_usage=0.7), in_flight=70, finished=70) is LimitChange.HOLD


def test_a_queue_is_long_from_half_of_the_running_requests() -> None:
    made = controller(start=100)
    for _ in range(20):
        assert verdict_of(made, quiet(waiting=25), finished=0) is LimitChange.HOLD
    for _ in range(5):
        assert verdict_of(made, quiet(waiting=26), finished=0) is LimitChange.HOLD
    verdict_of(made, quiet(waiting=0), finished=0)  # the count starts over
    for _ in range(5):
        assert verdict_of(made, quiet(waiting=26), finished=0) is LimitChange.HOLD
    assert verdict_of(made, quiet(waiting=26), finished=0) is LimitChange.TRIM


def test_a_trim_because_of_a_queue_waits_for_the_surplus_to_finish() -> None:
    made = controller(start=80)
    for _ in range(9):
        assert verdict_of(made, quiet(waiting=30), in_flight=81, finished=0) is LimitChange.HOLD
    assert verdict_of(made, quiet(waiting=30), in_flight=80, finished=0) is LimitChange.TRIM


def test_a_reduction_never_raises_the_limit() -> None:
    made = controller(start=100)
    assert made.observe(quiet(kv_usage=0.81), in_flight=100, finished=100).limit == 86
    made = controller(start=100)
    decision = made.observe(quiet(kv_usage=0.96), in_flight=300, finished=0)
    assert decision == ConcurrencyDecision(LimitChange.CUT, 100, cancel=200)
    made = controller(start=100)
    assert made.observe(quiet(kv_usage=0.96), in_flight=50, finished=0).cancel == 14


def test_a_single_running_request_is_counted_completely() -> None:
    made = controller(start=100)
    load = quiet(kv_usage=1.0, running=1, waiting=0)
    assert made.observe(load, in_flight=100, finished=0).limit == 70


def test_polls_without_preemptions_and_restarted_counters_add_up_to_nothing() -> None:
    made = controller(start=20)
    for preemptions in (5, 5, 5, 5, 4, 3, 2, 1, 0, 0, 1):
        assert verdict_of(made, quiet(preemptions=preemptions), in_flight=20) is LimitChange.HOLD
    assert verdict_of(made, quiet(preemptions=2), in_flight=20) is LimitChange.TRIM
    assert made.limit == 16


def under_pressure(kv_usage: float = 0.5) -> tuple[Concurrency, Load]:
    """Return a controller that reduced its limit from 100 to 80, and a load at which it would grow."""
    made = controller(start=100)
    easy = quiet(kv_usage=kv_usage)
    verdict_of(made, easy, in_flight=0, finished=0)
    decision = made.observe(quiet(kv_usage=kv_usage, preemptions=6), in_flight=80, finished=100)
    assert decision == ConcurrencyDecision(LimitChange.TRIM, 80)
    return made, quiet(kv_usage=kv_usage, preemptions=6)


def test_after_a_reduction_six_polls_and_a_turnover_must_pass() -> None:
    made, easy = under_pressure()
    verdicts = [verdict_of(made, easy, in_flight=80, finished=80) for _ in range(6)]
    assert verdicts == [LimitChange.HOLD] * 5 + [LimitChange.GROW]
    made, easy = under_pressure()
    for _ in range(9):
        assert verdict_of(made, easy, in_flight=80, finished=0) is LimitChange.HOLD
    assert verdict_of(made, easy, in_flight=80, finished=79) is LimitChange.HOLD
    assert verdict_of(made, easy, in_flight=80, finished=1) is LimitChange.GROW


def test_the_limit_stays_a_tenth_below_pressure_for_ten_turnovers() -> None:
    made, easy = under_pressure()
    limits = [made.observe(easy, in_flight=made.limit, finished=made.limit).limit for _ in range(11)]
    assert limits == [80] * 5 + [90] * 5 + [112]


def test_below_pressure_the_limit_never_doubles() -> None:
    made, easy = under_pressure(kv_usage=0.1)
    made.limit = 40
    for _ in range(5):
        verdict_of(made, easy, in_flight=40, finished=20)
    assert made.observe(easy, in_flight=40, finished=40).limit == 50


def test_an_engine_that_joins_ends_the_memory_of_pressure() -> None:
    made, easy = under_pressure()
    for _ in range(5):
        verdict_of(made, easy, in_flight=80, finished=80)
    more = quiet(num_engines=2, kv_usage=0.5, preemptions=6)
    assert made.observe(more, in_flight=80, finished=80).limit == 100


def test_the_start_is_clipped_to_the_bounds() -> None:
    config = AdaptiveConcurrency(min=4)
    assert [Concurrency(config, start=start, ceiling=9).limit for start in (1, 6, 20)] == [4, 6, 9]
    assert Concurrency(config, start=20, ceiling=2).limit == 2
