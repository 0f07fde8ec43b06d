"""The concurrency controller on a simulated fleet: it fills the engines, does not overfill them, and comes to rest.

The simulator has what makes the real thing hard: a rollout's cache grows while it runs, so pressure shows long after
the permit was given; engines preempt the youngest when the cache is full, and its tokens are generated again.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl_hpc.orchestrator.concurrency import Concurrency, Decision, Load, Verdict
from primerl_hpc.recipe.rollout_schema import AdaptiveConcurrency

TICKS_PER_LOOK, TOKENS_PER_TICK, PROMPT = 5, 20, 100


@dataclass
class Request:
    length: int  # tokens it will have
    have: int = PROMPT


@dataclass
class Engine:
    capacity: int  # tokens of KV cache
    max_seqs: int
    running: list[Request] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    preemptions: int = 0

    @property
    def used(self) -> int:
        return sum(request.have for request in self.running)

    def tick(self) -> int:
        """How many requests finished."""
        used = self.used
        while self.waiting and len(self.running) < self.max_seqs and used + PROMPT <= self.capacity:
            self.running.append(self.waiting.popleft())
            used += self.running[-1].have
        for request in self.running:
            request.have += TOKENS_PER_TICK
        while self.used > self.capacity:
            youngest = self.running.pop()
            youngest.have = PROMPT
            self.waiting.appendleft(youngest)
            self.preemptions += 1
        before = len(self.running)
        self.running = [request for request in self.running if request.have < request.length]
        return before - len(self.running)


class Fleet:
    def __init__(self, num: int, *, capacity: int, max_seqs: int = 10_000, mean: int = 2000, seed: int = 0):
        self.engines = [Engine(capacity, max_seqs) for _ in range(num)]
        self.random, self.mean = random.Random(seed), mean

    @property
    def in_flight(self) -> int:
        return sum(len(engine.running) + len(engine.waiting) for engine in self.engines)

    def run(self, limit: int) -> int:
        """To the next look, with always as many requests as permitted; how many finished."""
        finished = 0
        for _ in range(TICKS_PER_LOOK):
            while self.in_flight < limit:
                length = PROMPT + max(1, int(self.random.lognormvariate(0, 0.6) * self.mean))
                emptiest = min(self.engines, key=lambda engine: len(engine.running) + len(engine.waiting))
                emptiest.waiting.append(Request(length))
            finished += sum(engine.tick() for engine in self.engines)
        return finished

    def take_back(self, count: int) -> None:
        """The youngest first, waiting ones before running ones."""
        for engine in self.engines * count:
            if count and (queue := engine.waiting or engine.running):
                queue.pop()
                count -= 1

    def look(self) -> Load:
        return Load(
            num_engines=len(self.engines),
            kv_usage=fmean(engine.used / engine.capacity for engine in self.engines),
            running=sum(len(engine.running) for engine in self.engines),
            waiting=sum(len(engine.waiting) for engine in self.engines),
            preemptions=sum(engine.preemptions for engine in self.engines),
        )


@dataclass
class History:
    limits: list[int] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    preemptions: list[float] = field(default_factory=list)

    def turns(self, start: int) -> int:
        """How often the limit went down after it had gone up, from look ``start`` on."""
        ups = [after > before for before, after in pairwise(self.limits[start:]) if after != before]
        return sum(before and not after for before, after in pairwise(ups))


def simulate(fleet: Fleet, controller: Concurrency, looks: int, history: History | None = None) -> History:
    history = history or History()
    for _ in range(looks):
        finished = fleet.run(controller.limit)
        load = fleet.look()
        decision = controller.observe(load, in_flight=fleet.in_flight, finished=finished)
        fleet.take_back(decision.cancel)
        history.limits.append(decision.limit)
        history.verdicts.append(decision.verdict)
        history.finished.append(finished)
        history.preemptions.append(load.preemptions)
    return history


def controller(start: int = 8, ceiling: int = 1024) -> Concurrency:
    return Concurrency(AdaptiveConcurrency(), start=start, ceiling=ceiling)


FLEETS = {
    "one small engine": {"num": 1, "capacity": 40_000},
    "four engines": {"num": 4, "capacity": 40_000},
    "long rollouts": {"num": 2, "capacity": 200_000, "mean": 8000},
    "few sequences": {"num": 2, "capacity": 400_000, "max_seqs": 16},
}


@pytest.mark.parametrize("start", [1, 400])
@pytest.mark.parametrize("name", FLEETS)
def test_it_comes_to_rest_where_engines_are_busy_and_nothing_is_thrown_away(name, start):
    history = simulate(Fleet(**FLEETS[name]), controller(start), 3000)
    half = 1500
    assert history.turns(half) <= 10
    assert history.preemptions[-1] - history.preemptions[half] <= 0.25 * sum(history.finished[half:])
    best = max(sum(simulate_fixed(Fleet(**FLEETS[name]), limit, 900)[300:]) for limit in (8, 16, 32, 64, 128))
    assert sum(history.finished[-600:]) >= 0.5 * best


def simulate_fixed(fleet: Fleet, limit: int, looks: int) -> list[int]:
    return [fleet.run(limit) for _ in range(looks)]


def test_it_grows_again_when_engines_join_and_shrinks_when_they_leave():
    fleet, made = Fleet(2, capacity=40_000), controller()
    history = simulate(fleet, made, 800)
    alone = made.limit
    fleet.engines += [Engine(40_000, 10_000) for _ in range(4)]
    simulate(fleet, made, 800, history)
    joined = made.limit
    assert joined > 1.5 * alone
    del fleet.engines[1:]
    simulate(fleet, made, 800, history)
    assert made.limit < 0.5 * joined


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
def test_whatever_engines_say_the_limit_stays_in_its_bounds(looks, start, low, ceiling):
    made = Concurrency(AdaptiveConcurrency(min=low), start=start, ceiling=ceiling)
    for engines, usage, running, waiting, preemptions, in_flight, finished in looks:
        before = made.limit
        load = Load(engines, usage, running, waiting, preemptions)
        decision = made.observe(load, in_flight=in_flight, finished=finished)
        assert min(low, ceiling) <= decision.limit <= ceiling
        assert decision.limit == made.limit
        assert 0 <= decision.cancel <= max(0, in_flight - decision.limit)
        match decision.verdict:
            case Verdict.GROW:
                assert before < decision.limit <= max(before + 1, before * 2)
            case Verdict.HOLD:
                assert decision == Decision(Verdict.HOLD, before)
            case _:
                assert decision.limit <= before


def quiet(**changes) -> Load:
    return Load(
        **{"num_engines": 1, "kv_usage": 0.7, "running": 50, "waiting": 0, "preemptions": 0} | changes
    )


def test_a_full_cache_takes_the_youngest_back_and_waits_for_the_effect():
    made = controller(start=100)
    decision = made.observe(quiet(kv_usage=0.98), in_flight=100, finished=0)
    assert decision == Decision(Verdict.CUT, 71, cancel=29)
    for _ in range(5):
        assert made.observe(quiet(kv_usage=0.98), in_flight=71, finished=0).verdict is Verdict.HOLD
    assert made.observe(quiet(kv_usage=0.98), in_flight=71, finished=0).verdict is Verdict.CUT


def test_what_waits_does_not_fill_the_cache():
    decision = controller(start=100).observe(
        quiet(kv_usage=1.0, running=50, waiting=50), in_flight=100, finished=0
    )
    assert decision == Decision(Verdict.CUT, 35, cancel=65)


def test_a_cache_that_fills_up_is_drained_without_taking_anything_back():
    made = controller(start=100)
    decision = made.observe(quiet(kv_usage=0.85), in_flight=100, finished=100)
    assert decision == Decision(Verdict.TRIM, 82, cancel=0)
    for in_flight in (100, 90, 83):  # still draining, whatever finishes
        decision = made.observe(quiet(kv_usage=0.9), in_flight=in_flight, finished=200)
        assert decision.verdict is Verdict.HOLD


def test_many_preemptions_shrink_the_limit_and_few_or_a_restarted_engines_counter_do_not():
    made = controller(start=100)
    made.observe(quiet(preemptions=50), in_flight=100, finished=100)
    assert made.observe(quiet(preemptions=3), in_flight=100, finished=0).verdict is Verdict.HOLD
    assert made.observe(quiet(preemptions=8), in_flight=100, finished=0).verdict is Verdict.HOLD
    assert made.observe(quiet(preemptions=9), in_flight=100, finished=0).limit == 80


def test_an_engine_that_misses_a_look_brings_no_preemptions_back():
    made = controller(start=100)
    for engines, preemptions in ((2, 500), (1, 200), (2, 501)):
        load = quiet(num_engines=engines, preemptions=preemptions)
        assert made.observe(load, in_flight=100, finished=100).verdict is Verdict.HOLD


def test_only_a_queue_that_stays_shrinks_the_limit():
    made = controller(start=80)
    for _ in range(5):
        assert made.observe(quiet(waiting=30), in_flight=80, finished=0).verdict is Verdict.HOLD
    assert made.observe(quiet(waiting=30), in_flight=80, finished=0).limit == 62


def test_it_grows_only_after_a_turnover_with_every_permit_used():
    made = controller(start=100)
    easy = quiet(kv_usage=0.3)
    assert made.observe(easy, in_flight=100, finished=99).verdict is Verdict.HOLD
    assert made.observe(easy, in_flight=80, finished=1).verdict is Verdict.HOLD
    assert made.observe(easy, in_flight=100, finished=0) == Decision(Verdict.GROW, 125)
    assert made.observe(easy, in_flight=125, finished=100).verdict is Verdict.HOLD


def test_no_engine_no_growth():
    made = controller(start=10)
    nobody = Load(0, 0.0, 0, 0, 0)
    assert made.observe(nobody, in_flight=10, finished=100).verdict is Verdict.HOLD
