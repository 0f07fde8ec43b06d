"""The simulator: the orchestrator's scheduling rules, conservation, bounds, limits with closed forms, speed."""

from __future__ import annotations

import cProfile
import pstats
import random
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from primerl_hpc.orchestrator.rollout_data import Group, TaskRef
from primerl_hpc.orchestrator.scheduling.dispatcher import Dispatcher, DispatchLimits
from primerl_hpc.plan.simulation.lengths import Lengths
from primerl_hpc.plan.simulation.sides import (
    EngineSide,
    PrefillSide,
    TrainerSide,
    Workload,
    closed_form_step_s,
)
from primerl_hpc.plan.simulation.simulate import simulate

CURVE = ((1, 0.010), (64, 0.016), (256, 0.030))


def workload(**changes: Any) -> Workload:
    values = {
        "batch_size": 64,
        "group_size": 8,
        "max_in_flight": 128,
        "max_off_policy_steps": 2,
        "lengths": Lengths.lognormal(500, 1.0, 4096),
    }
    return Workload(**values | changes)


def reference(load: Workload, token_s: float, trainer_s: float, pause_s: float, steps: int, seed: int):
    """Run the real dispatcher against engines that never share: a rollout of n tokens takes n × token_s seconds.

    Returns (end of each step, ages of each batch).
    """
    draw, numbers = random.Random(seed), count()
    dispatcher = Dispatcher(
        next_task=lambda: TaskRef(0, 0),
        limits=DispatchLimits(
            group_size=load.group_size,
            batch_size=load.batch_size,
            max_in_flight=load.max_in_flight,
            max_off_policy_steps=load.max_off_policy_steps,
            async_level=load.async_level,
        ),
        last_step=10**6,
    )
    events: list[tuple[float, int, str, Any]] = []
    queue: list[Group] = []
    inbox: list[int] = []
    state = {"now": 0.0, "updating": False, "shipping": False, "training": False, "published": 0}
    ends: list[float] = []
    ages: list[list[int]] = []

    def at(seconds: float, kind: str, argument: Any = None) -> None:
        heappush(events, (state["now"] + seconds, next(numbers), kind, argument))

    def react() -> None:
        fresh = dispatcher.min_fresh_version
        queue[:] = [group for group in queue if min(group.versions) >= fresh]
        queued = sum(len(group.versions) for group in queue)
        if dispatcher.may_ship and not state["shipping"] and queued >= load.batch_size:
            taken: list[int] = []
            while len(taken) < load.batch_size:
                taken += queue.pop(0).versions
            ages.append([dispatcher.step - 1 - version for version in taken])
            dispatcher.advance(dispatcher.step + 1)
            state["shipping"] = True
            at(0.0, "arrives")
            fresh = dispatcher.min_fresh_version
            queue[:] = [group for group in queue if min(group.versions) >= fresh]
        if not state["updating"]:
            for start in dispatcher.next_starts(sum(len(group.versions) for group in queue)):
                tokens = load.lengths.values[int(draw.random() * len(load.lengths.values))]
                at(tokens * token_s, "rollout", start.rollout_id)

    def train() -> None:
        if inbox and not state["training"]:
            inbox.pop()
            state["training"] = True
            at(trainer_s, "trained")

    react()
    while len(ends) < steps:
        state["now"], _, kind, argument = heappop(events)
        if kind == "rollout":
            # the orchestrator takes all outcomes of a moment at once
            ended = [argument]
            while events and events[0][0] == state["now"] and events[0][2] == "rollout":
                ended.append(heappop(events)[3])
            queue += [group for item in ended if (group := dispatcher.finished(item, None)) is not None]
        elif kind == "arrives":
            state["shipping"] = False
            inbox.append(1)
            train()
        elif kind == "trained":
            state["training"] = False
            state["published"] += 1
            ends.append(state["now"])
            if not state["updating"] and state["published"] == dispatcher.version + 1:
                at(0.0, "update")
            train()
        elif kind == "update":
            state["updating"] = True
            events[:] = [
                (time + pause_s * (kind == "rollout"), number, kind, argument)
                for time, number, kind, argument in events
            ]
            events.sort()
            at(pause_s, "live", state["published"])
        elif kind == "live":
            dispatcher.policy_live(argument)
            state["updating"] = False
            if state["published"] > argument:
                at(0.0, "update")
        react()
    return ends, ages


@settings(max_examples=25, deadline=None)
@given(
    window=st.integers(0, 5),
    level=st.none() | st.integers(0, 5),
    in_flight=st.sampled_from([24, 64, 100, 200]),
    trainer_s=st.floats(0.1, 20.0),
    pause_s=st.sampled_from([0.0, 1.5]),
    seed=st.integers(0, 10**6),
)
def test_the_simulator_schedules_like_the_orchestrator(
    window: int, level: int | None, in_flight: int, trainer_s: float, pause_s: float, seed: int
) -> None:
    level = None if level is None else min(level, window)
    load = workload(max_in_flight=in_flight, max_off_policy_steps=window, async_level=level)
    ends, ages = reference(load, 0.01, trainer_s, pause_s, 12, seed)
    engines = EngineSide(1, ((1, 0.01),), max_running=400, pause_s=pause_s)
    result = simulate(load, engines, TrainerSide(trainer_s), steps=12, warm_up=0, seed=seed)
    assert result.step_s == pytest.approx(ends[-1] / 12, rel=1e-6)
    assert result.staleness_max == max(max(batch) for batch in ages[:12])
    means = [sum(batch) / len(batch) for batch in ages[:12]]
    assert result.staleness_mean == pytest.approx(sum(means) / len(means), abs=1e-9)


LOADS = st.builds(
    lambda groups, size, window, permits, cv, turns, env_s, kept: workload(
        batch_size=groups * size,
        group_size=size,
        max_off_policy_steps=window,
        max_in_flight=permits,
        lengths=Lengths.lognormal(300, cv, 3000),
        turns=turns,
        env_s=env_s,
        kept_share=kept,
    ),
    st.integers(1, 8),
    st.integers(1, 16),
    st.integers(0, 6),
    st.integers(1, 300),
    st.floats(0, 2),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([1.0, 0.6]),
)
SIDES = st.builds(
    lambda num, running, prefill, pause, routing, detect, others: EngineSide(
        num, CURVE, running, prefill, 0.0, pause, routing, detect, others
    ),
    st.integers(1, 5),
    st.integers(1, 64),
    st.sampled_from([0.0, 0.05]),
    st.sampled_from([0.0, 2.0]),
    st.sampled_from(["prefix", "least_busy", "session"]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([None, PrefillSide(1, 0.2, 0.3, 0.1, 0.05), PrefillSide(3, 0.01)]),
)
TRAINERS = st.builds(
    TrainerSide, st.floats(0.1, 60), st.sampled_from([0.0, 1e-4]), st.sampled_from([0.0, 1.0])
)


@settings(max_examples=60, deadline=None)
@given(load=LOADS, engines=SIDES, trainer=TRAINERS, seed=st.integers(0, 1000))
def test_no_rollout_is_lost_and_every_figure_is_in_its_bounds(
    load: Workload, engines: EngineSide, trainer: TrainerSide, seed: int
) -> None:
    result = simulate(load, engines, trainer, steps=8, warm_up=2, seed=seed)
    assert result.num_started == result.num_used + result.num_discarded + result.num_left
    assert result.staleness_max <= load.max_off_policy_steps
    assert 0 <= result.staleness_mean <= result.staleness_max
    assert 0 <= result.trainer_idle < 1 + 1e-9
    assert -1e-9 <= result.engine_idle <= 1 + 1e-9
    assert (result.prefill_idle is None) == (engines.prefill is None)
    assert 0 <= (result.prefill_idle or 0.0) <= 1
    assert 0 <= result.in_flight <= load.max_in_flight * (1 + 1e-9)
    assert result.step_s >= trainer.fixed_s + trainer.publish_s - 1e-9
    assert result == simulate(load, engines, trainer, steps=8, warm_up=2, seed=seed)


@settings(max_examples=30, deadline=None)
@given(trainer_s=st.floats(1, 100), num=st.integers(1, 4), tokens=st.integers(50, 500))
@example(trainer_s=1.0, num=4, tokens=124)
def test_constant_lengths_meet_the_closed_form_with_a_wide_window(
    trainer_s: float, num: int, tokens: int
) -> None:
    load = workload(
        lengths=Lengths.constant(tokens), max_off_policy_steps=8, max_in_flight=num * 32, group_size=8
    )
    engines = EngineSide(num, ((1, 0.01), (64, 0.02)), max_running=64)
    result = simulate(load, engines, TrainerSide(trainer_s), steps=60, warm_up=20)
    ideal_s = closed_form_step_s(load, engines, TrainerSide(trainer_s))
    assert 0.97 * ideal_s <= result.step_s <= 1.15 * ideal_s


def test_two_batches_that_end_together_do_not_make_both_sides_wait_in_turn() -> None:
    """Rollouts of the next batch start although the trainer has a batch ahead; the real dispatcher confirms it."""
    trainer_s, token_s = 1.0, 0.015
    for tokens in (80, 100, 124, 132):
        load = workload(lengths=Lengths.constant(tokens), max_off_policy_steps=8, max_in_flight=128)
        engines, trainer = EngineSide(1, ((1, token_s),), max_running=128), TrainerSide(trainer_s)
        assert closed_form_step_s(load, engines, trainer) == trainer_s
        ends, _ = reference(load, token_s, trainer_s, 0.0, 60, 0)
        result = simulate(load, engines, trainer, steps=60, warm_up=20)
        assert result.step_s == pytest.approx((ends[-1] - ends[19]) / 40)
        assert result.step_s == pytest.approx(trainer_s) and result.trainer_idle == 0
        assert result.staleness_max == 2  # the window would allow 8


@pytest.mark.parametrize(("cv", "ratio"), [(0.0, 0.8), (0.3, 0.8), (1.0, 0.9)])
def test_equally_fast_sides_take_less_time_if_the_next_batch_is_collected_ahead(
    cv: float, ratio: float
) -> None:
    lengths = Lengths.lognormal(256, cv, longest=2048)
    token_s = 2.5 / 256 / 64  # of all sequences of an engine together
    engines = EngineSide(1, ((1.0, token_s), (1024.0, 1024 * token_s)), 1024, pause_s=0.05, detect_s=0.05)
    trainer = TrainerSide(0.1, token_s, publish_s=0.1, deliver_s=0.02)
    waiting, ahead = (
        simulate(workload(lengths=lengths, async_level=level), engines, trainer, steps=60)
        for level in (1, None)
    )
    assert ahead.step_s < ratio * waiting.step_s
    assert ahead.staleness_max == waiting.staleness_max == 2


def test_synchronous_training_takes_both_times_one_after_the_other() -> None:
    load = workload(max_off_policy_steps=0, max_in_flight=64, lengths=Lengths.constant(400))
    engines = EngineSide(1, ((1, 0.01), (64, 0.02)), max_running=64, pause_s=2.0)
    result = simulate(load, engines, TrainerSide(10.0), steps=12)
    assert result.step_s == pytest.approx(400 * 0.02 + 10.0 + 2.0)
    assert result.trainer_idle == pytest.approx(10.0 / 20.0)
    assert result.engine_idle == pytest.approx(12.0 / 20.0)
    assert result.staleness_max == 0


def test_a_long_tail_makes_the_closed_form_too_optimistic_and_a_wider_window_repairs_it() -> None:
    engines = EngineSide(7, ((1, 0.008), (128, 0.0145)), max_running=128, pause_s=4.0)
    trainer = TrainerSide(90.0)
    steps = {}
    for window in (1, 3, 8):
        load = workload(
            batch_size=1024,
            group_size=16,
            max_in_flight=2048,
            max_off_policy_steps=window,
            lengths=Lengths.lognormal(5000, 1.0),
        )
        steps[window] = simulate(load, engines, trainer, steps=16).step_s
        assert closed_form_step_s(load, engines, trainer) == pytest.approx(90, rel=0.03)
    assert steps[1] > 1.3 * steps[3] > 1.1 * 1.3 * steps[8]
    assert steps[8] == pytest.approx(90, rel=0.05)


def test_environment_latency_lengthens_rollouts_but_not_the_time_on_engines() -> None:
    load = workload(max_in_flight=64, lengths=Lengths.constant(400), turns=4, max_off_policy_steps=0)
    engines = EngineSide(1, ((1, 0.01),), max_running=64)
    plain = simulate(load, engines, TrainerSide(1.0), steps=8)
    slow = simulate(replace(load, env_s=2.0), engines, TrainerSide(1.0), steps=8)
    assert plain.step_s == pytest.approx(400 * 0.01 + 1.0)
    assert slow.step_s == pytest.approx(400 * 0.01 + 4 * 2.0 + 1.0)


def test_prompts_take_time_of_prefill_engines_and_not_of_those_that_decode() -> None:
    """One prefill engine processes each group's prompt once, and each later turn of a rollout."""
    load = workload(max_off_policy_steps=0, max_in_flight=64, lengths=Lengths.constant(400), turns=2)
    engines = EngineSide(1, ((1, 0.01),), max_running=64)
    plain = simulate(load, engines, TrainerSide(1.0), steps=8)
    assert plain.step_s == pytest.approx(400 * 0.01 + 1.0) and plain.prefill_idle is None
    # the last of 8 groups waits for 8 prompts of 0.5 s; the 64 later turns of 0.05 s are hidden behind decoding
    side = PrefillSide(1, prompt_s=0.5, turn_s=0.05, transfer_s=0.25)
    result = simulate(load, replace(engines, prefill=side), TrainerSide(1.0), steps=8)
    assert result.prefill_idle == pytest.approx(1 - (8 * 0.5 + 64 * 0.05) / result.step_s)
    assert result.step_s == pytest.approx(8 * 0.5 + 8 * 0.05 + 2 * 0.25 + 400 * 0.01 + 1.0, rel=0.1)
    assert result.step_s > plain.step_s + 8 * 0.5
    alone = replace(side, alone_s=9.0)
    slow = simulate(load, replace(engines, prefill=alone), TrainerSide(1.0), steps=8)
    assert slow.step_s == pytest.approx(2 * (9.0 + 0.25) + 400 * 0.01 + 1.0)


def test_too_few_prefill_engines_bound_the_steps() -> None:
    load = workload(max_off_policy_steps=8, max_in_flight=256, lengths=Lengths.constant(400))
    engines = EngineSide(4, ((1, 0.01),), max_running=64)
    for number in (1, 2):
        side = replace(engines, prefill=PrefillSide(number, prompt_s=10.0))
        result = simulate(load, side, TrainerSide(1.0), steps=40)
        # the rollouts of a group are spread over both engines, each of which processes the prompt
        assert result.step_s == pytest.approx(8 * 10.0, rel=0.05)
        assert result.prefill_idle == pytest.approx(0.0, abs=0.05)
        assert closed_form_step_s(load, side, TrainerSide(1.0)) == pytest.approx(80.0, rel=0.01)


@pytest.mark.parametrize(("mean", "cv"), [(500.0, 0.0), (500.0, 0.5), (5000.0, 1.5)])
def test_a_lognormal_distribution_has_the_requested_mean_and_cv(mean: float, cv: float) -> None:
    lengths = Lengths.lognormal(mean, cv)
    assert lengths.mean == pytest.approx(mean)
    assert lengths.cv == pytest.approx(cv, rel=0.05)  # the last quantile cuts the tail
    cut = Lengths.lognormal(mean, cv, longest=2 * mean)
    assert cut.values[-1] <= 2 * mean
    assert cut.mean == pytest.approx(mean, rel=1e-3)
    assert Lengths.lognormal(mean, cv, longest=mean / 2) == Lengths.constant(mean / 2)


def test_a_histogram_keeps_its_mean() -> None:
    lengths = Lengths.histogram([100, 300, 1000], [50, 0, 50])
    assert lengths.mean == pytest.approx(550)
    with pytest.raises(ValueError, match="empty"):
        Lengths.histogram([100], [0])


def test_the_cost_of_a_simulated_rollout_does_not_grow_with_the_batch() -> None:
    """Function calls are counted, because seconds depend on the machine; 40 steps of 1,024 take about 0.3 s."""
    for batch_size in (256, 2048):
        load = workload(
            batch_size=batch_size,
            group_size=16,
            max_in_flight=2 * batch_size,
            lengths=Lengths.lognormal(5000, 1.0, 32_768),
        )
        engines = EngineSide(7, ((1, 0.01), (256, 0.03)), max_running=256, pause_s=4.0)
        profiler = cProfile.Profile()
        result = profiler.runcall(simulate, load, engines, TrainerSide(90.0), steps=10)
        assert pstats.Stats(profiler).total_calls < 45 * result.num_started
