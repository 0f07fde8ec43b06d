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

from primerl_hpc.orchestrator.scheduling.concurrency import Concurrency, LimitChange, Load
from primerl_hpc.recipe.schema.rollout import AdaptiveConcurrency

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
    verdicts: list[LimitChange] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    preemptions: list[float] = field(default_factory=list)

    def turns(self, start: int) -> int:
        """Return how often the limit fell after it had risen, from observation ``start``."""
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
def test_the_limit_settles_where_engines_are_busy_and_little_work_is_discarded(name, start):
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
