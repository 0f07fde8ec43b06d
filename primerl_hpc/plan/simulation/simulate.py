"""Discrete-event simulation of asynchronous RL: step time, idle shares of both sides, staleness.

    result = simulate(workload, engines, trainer, steps=40, seed=0)
    result.step_s, result.trainer_idle, result.engine_idle, result.staleness_mean

The scheduling rules are those of `orchestrator.scheduling.dispatcher` (permits, demand, gate, groups, staleness),
`orchestrator.train_loop` (batch n ships when v{n-1-async_level} is live),
`orchestrator.engines.weight_watcher` (pause, load, resume; nothing starts meanwhile) and `inference.balancing` (a
group stays on its engine unless that is much busier than the others), and `inference.prefill` (a prompt is processed
by a prefill engine first). Rollouts on an engine share it: with b running sequences each generates a token every t(b)
seconds.

Not simulated: evaluations, failures, the correlation of lengths within a group, engines that differ, and the growth
of t(b) with the context (pass t(b) at the mean context of running sequences, see `Lengths.mean_position`).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from primerl_hpc.plan.simulation.requests import (
    PrefillQueues,
    SimulatedEngine,
    SimulatedGroup,
    SimulatedRollout,
)
from primerl_hpc.plan.simulation.sides import EngineSide, SimulatedRun, TrainerSide, Workload
from primerl_hpc.recipe.schema.rollout import start_lead

RELATIVE_SLACK = 1.1
"""A group leaves its engine if that has more requests than this times the least busy one, see `inference.balancing`."""


def simulate(
    workload: Workload,
    engines: EngineSide,
    trainer: TrainerSide,
    *,
    steps: int = 40,
    warm_up: int | None = None,
    seed: int = 0,
) -> SimulatedRun:
    """Simulate ``steps`` trainer steps of an endless run. Deterministic: equal arguments give an equal result.

    ``warm_up``: steps that are not part of the means; None: a quarter.
    """
    run = _Run(workload, engines, trainer, seed)
    return run.until(steps, steps // 4 if warm_up is None else warm_up)


class _Run:
    """State of a simulation. Events: an engine finishes a request, an environment responds, a batch arrives at the
    trainer, a step ends, an update starts, a version goes live."""

    def __init__(self, workload: Workload, engines: EngineSide, trainer: TrainerSide, seed: int) -> None:
        self.workload, self.side, self.trainer = workload, engines, trainer
        self.random, self.numbers = random.Random(seed), count()
        self.draw_length = workload.lengths.drawer(self.random)
        self.engines = [SimulatedEngine() for _ in range(engines.num_engines)]
        self.token_s = [engines.token_s(running) for running in range(engines.max_running + 1)]
        self.least = self.engines[0]
        """The least busy engine when a group was opened last: finding it for every request would be slow."""
        self.prefill = None if engines.prefill is None else PrefillQueues(engines.prefill, self.random)
        self.slack = workload.group_size
        self.now, self.events = 0.0, []  # (time, number, handler, argument)
        self.due: list[SimulatedEngine] = []  # their next event changed
        # the dispatcher
        self.step, self.version, self.in_flight, self.pending = 1, 0, 0, 0
        self.lag = workload.max_lead
        self.start_lag = start_lead(workload.async_level, workload.max_off_policy_steps)
        self.open: dict[SimulatedGroup, None] = {}
        self.startable: deque[SimulatedGroup] = deque()
        self.queue: deque[SimulatedGroup] = deque()
        self.queued = 0
        self.is_updating = self.is_shipping = False
        self.may_start = True
        """False if no rollout could start since the last `_dispatch`: most events change nothing that it checks."""
        # the trainer
        self.inbox: deque[float] = deque()
        self.waits_since: float | None = 0.0
        self.published = 0
        self.step_ends: list[float] = []
        # measurements since the end of the warm-up
        self.in_flight_area = self.idle_area = self.waited_s = self.tokens = self.generated = 0.0
        self.num_idle = engines.num_engines
        self.ages: list[tuple[float, int]] = []  # mean and maximum of each batch
        self.started = self.used = self.discarded = 0

    def until(self, steps: int, warm_up: int) -> SimulatedRun:
        self._react()
        started = 0.0
        while len(self.step_ends) < steps:
            time, _, handler, argument = heappop(self.events)
            passed = time - self.now
            self.in_flight_area += self.in_flight * passed
            self.idle_area += self.num_idle * passed
            self.now = time
            ended = len(self.step_ends)
            handler(argument)
            if ended < len(self.step_ends) == warm_up:
                started = self.now
                self.in_flight_area = self.idle_area = self.waited_s = self.tokens = self.generated = 0.0
                if self.prefill is not None:
                    self.prefill.busy_s = 0.0
            self._react()
        window = self.now - started
        measured = self.ages[warm_up:steps] or self.ages
        return SimulatedRun(
            step_s=window / (steps - warm_up),
            trainer_idle=self.waited_s / window,
            engine_idle=self.idle_area / window / len(self.engines),
            prefill_idle=None if self.prefill is None else self.prefill.idle(window),
            staleness_mean=sum(mean for mean, _ in measured) / len(measured),
            staleness_max=max(most for _, most in measured),
            in_flight=self.in_flight_area / window,
            tokens_per_s=self.tokens / window,
            engine_tokens_per_s=self.generated / window,
            discarded=self.discarded / max(1, self.started),
            num_started=self.started,
            num_used=self.used,
            num_discarded=self.discarded,
            num_left=self.in_flight + self.queued + sum(group.ended for group in self.open),
        )

    # -- reactions to an event ---------------------------------------------------------------------
    def _react(self) -> None:
        """Ship what is ready, start what may start, and schedule the next event of each engine that changed."""
        if self.queued >= self.workload.batch_size and not self.is_shipping and self._lead <= self.lag:
            self._ship()
        if self.may_start and self.in_flight < self.workload.max_in_flight and not self.is_updating:
            self._dispatch()
            self.may_start = False
        for engine in self.due:
            engine.is_due = False
            engine.stamp += 1
            if engine.running:
                rest = engine.running[0][0] - engine.work
                time = engine.clock + rest * self.token_s[len(engine.running)]
                heappush(self.events, (time, next(self.numbers), self._requests_end, (engine, engine.stamp)))
        self.due.clear()

    def _at(self, seconds: float, handler: Callable[[Any], None], argument: Any) -> None:
        heappush(self.events, (self.now + seconds, next(self.numbers), handler, argument))

    # -- dispatcher --------------------------------------------------------------------------------
    @property
    def _lead(self) -> int:
        return (self.step - 1) - self.version

    def _dispatch(self) -> None:
        """Start rollouts: open groups first, then new ones, as permits, gate and demand allow."""
        workload, limit = self.workload, self.workload.max_in_flight
        if self._lead > self.start_lag:
            return
        self._continue_groups()
        num_batches = self.version + 2 + workload.max_off_policy_steps - self.step
        if self._lead > self.lag:  # a batch is ahead of the trainer: collect the next one and no more
            num_batches = min(1, num_batches)
        demand = max(0, num_batches) * workload.batch_size - self.queued - self.pending
        while self.in_flight < limit and demand > 0:
            group = SimulatedGroup(workload.group_size)
            self.open[group] = None
            self.startable.append(group)
            self.pending += workload.group_size
            demand -= workload.group_size
            self._continue_groups()

    def _continue_groups(self) -> None:
        draw, turns, startable = self.draw_length, self.workload.turns, self.startable
        while startable and self.in_flight < self.workload.max_in_flight:
            group = startable[0]
            if group.oldest is None:
                group.oldest = self.version
            room = min(group.to_start, self.workload.max_in_flight - self.in_flight)
            for _ in range(room):
                tokens = draw()
                group.tokens += tokens
                self._request(SimulatedRollout(group, tokens / turns, turns))
            group.to_start -= room
            group.versions += room * self.version
            self.in_flight += room
            self.started += room
            if not group.to_start:
                startable.popleft()

    def _rollout_ends(self, rollout: SimulatedRollout) -> None:
        group = rollout.group
        if not group.is_open:
            return
        self.in_flight -= 1
        self.may_start = True
        group.ended += 1
        size = self.workload.group_size
        if group.ended < size:
            return
        self._close(group)
        if self.workload.kept_share < 1 and self.random.random() >= self.workload.kept_share:
            self.discarded += size
            return
        self.queue.append(group)
        self.queued += size

    def _close(self, group: SimulatedGroup) -> None:
        group.is_open = False
        del self.open[group]
        self.pending -= self.workload.group_size

    def _cancel_stale(self, min_fresh: int) -> None:
        """Cancel the open groups, and drop the queued ones, that the batch being collected may not use."""
        size = self.workload.group_size
        kept = [group for group in self.queue if group.first_version >= min_fresh]
        if len(kept) < len(self.queue):
            self.discarded += (len(self.queue) - len(kept)) * size
            self.queue, self.queued = deque(kept), len(kept) * size
        stale = [group for group in self.open if group.oldest is not None and group.oldest < min_fresh]
        for group in stale:
            self._close(group)
            num_started = size - group.to_start
            self.in_flight -= num_started - group.ended
            self.discarded += num_started
        if not stale:
            return
        self.startable = deque(group for group in self.startable if group.is_open)
        for engine in self.engines:
            self._drop_closed(engine)

    # -- engines -----------------------------------------------------------------------------------
    def _request(self, rollout: SimulatedRollout) -> None:
        """Send a rollout's next turn to an engine, which lets a prefill engine process the prompt if there is one."""
        engine = self._engine_for(rollout)
        engine.load += 1
        if self.prefill is None:
            self._join(engine, rollout)
            return
        engine.pulling.add(rollout)
        wait_s = self.prefill.ready_at(self.now, rollout) - self.now
        self._at(wait_s, self._prompt_ends, (engine, rollout, self.prefill.paused_s))

    def _prompt_ends(self, argument: tuple[SimulatedEngine, SimulatedRollout, float]) -> None:
        engine, rollout, paused_s = argument
        assert self.prefill is not None
        if (more_s := self.prefill.paused_s - paused_s) > 0:
            self._at(more_s, self._prompt_ends, (engine, rollout, self.prefill.paused_s))
        elif rollout in engine.pulling:  # not cancelled since
            engine.pulling.remove(rollout)
            self._join(engine, rollout)

    def _join(self, engine: SimulatedEngine, rollout: SimulatedRollout) -> None:
        if self.now > engine.clock:
            self._advance(engine)
        if len(engine.running) < self.side.max_running:
            self._admit(engine, rollout)
        else:
            engine.waiting.append(rollout)

    def _engine_for(self, rollout: SimulatedRollout) -> SimulatedEngine:
        group, routing = rollout.group, self.side.routing
        if routing == "least_busy":
            return self._least_busy()
        if routing == "session":
            if rollout.engine is None:
                rollout.engine = self.engines[int(self.random.random() * len(self.engines))]
            return rollout.engine
        engine = group.engine
        if engine is None:
            self.least = engine = group.engine = self._least_busy()
        elif engine.load > self.least.load + self.slack and engine.load > RELATIVE_SLACK * self.least.load:
            engine = group.engine = self.least
        return engine

    def _least_busy(self) -> SimulatedEngine:
        if self.num_idle:
            return next(engine for engine in self.engines if not engine.running)
        return min(self.engines, key=_load)

    def _admit(self, engine: SimulatedEngine, rollout: SimulatedRollout) -> None:
        group = rollout.group
        engine.clock += self.side.turn_prefill_s if group.is_prefilled else self.side.prefill_s
        group.is_prefilled = True
        if not engine.running:
            self.num_idle -= 1
        heappush(engine.running, (engine.work + rollout.tokens, next(self.numbers), rollout))
        self._mark(engine)

    def _mark(self, engine: SimulatedEngine) -> None:
        if not engine.is_due:
            engine.is_due = True
            self.due.append(engine)

    def _advance(self, engine: SimulatedEngine) -> None:
        if self.now > engine.clock:
            if number := len(engine.running):
                tokens = (self.now - engine.clock) / self.token_s[number]
                engine.work += tokens
                self.generated += tokens * number
            engine.clock = self.now

    def _requests_end(self, argument: tuple[SimulatedEngine, int]) -> None:
        engine, stamp = argument
        if stamp != engine.stamp:
            return  # the engine's sequences changed since
        running = engine.running
        self.generated += (running[0][0] - engine.work) * len(running)
        engine.work, engine.clock = running[0][0], self.now
        ended: list[SimulatedRollout] = []
        while running and running[0][0] <= engine.work:
            ended.append(heappop(running)[2])
        engine.load -= len(ended)
        if not running:
            self.num_idle += 1
        self._fill(engine)
        for rollout in ended:
            self._turn_ends(rollout)

    def _turn_ends(self, rollout: SimulatedRollout) -> None:
        rollout.turns -= 1
        if self.workload.env_s:
            self._at(self.workload.env_s, self._environment_responds, rollout)
        elif rollout.turns:
            self._request(rollout)
        else:
            self._rollout_ends(rollout)

    def _environment_responds(self, rollout: SimulatedRollout) -> None:
        if not rollout.turns:
            self._rollout_ends(rollout)
        elif rollout.group.is_open:
            self._request(rollout)

    def _fill(self, engine: SimulatedEngine) -> None:
        """Admit waiting requests, and schedule the engine's next event."""
        while engine.waiting and len(engine.running) < self.side.max_running:
            self._admit(engine, engine.waiting.popleft())
        self._mark(engine)

    def _drop_closed(self, engine: SimulatedEngine) -> None:
        """Remove the requests of cancelled groups."""
        running = [item for item in engine.running if item[2].group.is_open]
        waiting = deque(rollout for rollout in engine.waiting if rollout.group.is_open)
        engine.pulling = {rollout for rollout in engine.pulling if rollout.group.is_open}
        load = len(running) + len(waiting) + len(engine.pulling)
        if load == engine.load:
            return
        self._advance(engine)
        if engine.running and not running:
            self.num_idle += 1
        heapify(running)
        engine.running, engine.waiting, engine.load = running, waiting, load
        self._fill(engine)

    # -- batches, trainer, weights -----------------------------------------------------------------
    def _ship(self) -> None:
        """Cut a batch of the groups that finished first, and cancel what the next one may not use."""
        size = self.workload.batch_size
        versions, tokens, num_rollouts, oldest = 0, 0.0, 0, self.version
        while num_rollouts < size:
            group = self.queue.popleft()
            versions, tokens = versions + group.versions, tokens + group.tokens
            num_rollouts += self.workload.group_size
            oldest = min(oldest, group.first_version)
        self.queued -= num_rollouts
        self.used += num_rollouts
        self.ages.append((self.step - 1 - versions / num_rollouts, self.step - 1 - oldest))
        self.step += 1
        self.may_start = True
        self._cancel_stale((self.step - 1) - self.workload.max_off_policy_steps)
        self.is_shipping = True
        self._at(self.trainer.deliver_s, self._batch_arrives, tokens)

    def _batch_arrives(self, tokens: float) -> None:
        self.is_shipping = False
        self.inbox.append(tokens)
        if self.waits_since is not None:
            self._train()

    def _train(self) -> None:
        if not self.inbox:
            self.waits_since = self.now
            return
        if self.waits_since is not None:
            self.waited_s += self.now - self.waits_since
            self.waits_since = None
        tokens = self.inbox.popleft()
        self._at(self.trainer.step_s(tokens), self._step_ends, tokens)

    def _step_ends(self, tokens: float) -> None:
        self.published += 1
        self.tokens += tokens
        self.step_ends.append(self.now)
        if not self.is_updating and self.published == self.version + 1:
            self._at(self.side.detect_s, self._update_starts, None)
        self.waits_since = self.now
        self._train()

    def _update_starts(self, _: None) -> None:
        if self.is_updating:
            return
        self.is_updating = True
        for engine in self.engines:
            self._advance(engine)
            engine.clock += self.side.pause_s
            self._mark(engine)
        if self.prefill is not None:
            self.prefill.pause(self.now, self.side.pause_s)
        self._at(self.side.pause_s, self._version_goes_live, self.published)

    def _version_goes_live(self, version: int) -> None:
        self.version, self.is_updating, self.may_start = version, False, True
        if self.published > version:
            self._at(self.side.detect_s, self._update_starts, None)


def _load(engine: SimulatedEngine) -> int:
    return engine.load
