"""Looks at the engines' metrics every two seconds: for the numbers of a step, and for how many rollouts may be in flight."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from primerl_hpc.common.names import Role
from primerl_hpc.orchestrator.concurrency import Concurrency, Decision, Load, Verdict
from primerl_hpc.orchestrator.dispatcher import Dispatcher
from primerl_hpc.orchestrator.fleet import Engine, Fleet

logger = logging.getLogger(__name__)

LOOK_S = 2.0


@dataclass
class StuckClock:
    """Which engines have requests and make no token: looks in, names out. An engine that answers nobody is not its matter."""

    limit_s: float
    _since: dict[str, tuple[float, float]] = field(default_factory=dict)  # tokens so far, since when

    def look(self, now: float, engines: Mapping[str, Mapping[str, float]]) -> list[str]:
        """Those that made none for longer than the limit; each is named once and then given as much time again."""
        stuck = []
        for name, engine in engines.items():
            tokens = engine.get("generation_tokens", 0.0)
            before, since = self._since.get(name, (None, now))
            if not engine.get("running") or tokens != before:
                self._since[name] = (tokens, now)
            elif now - since > self.limit_s:
                stuck.append(name)
                self._since[name] = (tokens, now)
        for name in self._since.keys() - engines.keys():
            del self._since[name]
        return stuck

    def forget(self) -> None:
        """Engines were paused: what was before says nothing."""
        self._since.clear()


class EngineWatch:
    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        concurrency: Concurrency | None,
        *,
        is_updating: Callable[[], bool],
        take_back: Callable[[int], None],
        stuck_after_s: float,
        frozen: Collection[Role] = (),
    ) -> None:
        """``concurrency`` None: the dispatcher's limit stays. ``take_back(n)`` cancels the youngest n rollouts or a few more.

        ``stuck_after_s``: an engine that has requests and makes no token for so long is to be started again, of the policy
        or of the ``frozen`` roles.
        """
        self.stuck = StuckClock(stuck_after_s)
        self.frozen = {role: StuckClock(stuck_after_s) for role in frozen}
        self.fleet, self.dispatcher, self.concurrency = fleet, dispatcher, concurrency
        self.is_updating, self.take_back = is_updating, take_back
        self._engines: dict[str, dict[str, float]] = {}
        self._generated: tuple[float, dict[str, float]] | None = None  # when, tokens by engine
        self._ended = self._num_looks = self._num_idle = 0
        self._verdicts = dict.fromkeys(Verdict, 0)

    async def watch(self) -> None:
        while True:
            was_updating = self.is_updating()
            self._engines = await self.fleet.metrics()
            prefill = await self.fleet.metrics(Role.PREFILL)  # paused with them, and no part of the load
            self._num_looks += len(self._engines)
            self._num_idle += sum(not engine.get("running") for engine in self._engines.values())
            if was_updating or self.is_updating():  # a paused engine says nothing about its load
                self.stuck.forget()
            else:
                self._steer()
                self._restart_stuck(self.fleet.policy(), self.stuck, self._engines | prefill)
            for role, clock in self.frozen.items():  # never paused
                self._restart_stuck(self.fleet.members(role), clock, await self.fleet.metrics(role))
            await asyncio.sleep(LOOK_S)

    def take_metrics(self) -> dict[str, float]:
        """Of the last look (an engine that hangs must not hold a batch up); rates and shares are since the last call."""
        engines = list(self._engines.values())
        load = load_of(engines)
        metrics: dict[str, float] = {"inference/engines": load.num_engines}
        if self.concurrency is not None:
            metrics["concurrency/limit"] = self.concurrency.limit
            metrics |= {f"concurrency/{verdict.value}": count for verdict, count in self._verdicts.items()}
            self._verdicts = dict.fromkeys(Verdict, 0)
        if self._num_looks:
            metrics["inference/idle"] = self._num_idle / self._num_looks
            self._num_looks = self._num_idle = 0
        if not engines:
            return metrics
        metrics |= {
            "inference/running": load.running,
            "inference/waiting": load.waiting,
            "inference/preemptions": load.preemptions,
            "inference/kv_usage/mean": load.kv_usage,
            "inference/kv_usage/max": max(engine.get("kv_usage", 0.0) for engine in engines),
        }
        for name in ("prefill_other", "prefill_self"):
            if any(name in engine for engine in engines):
                metrics[f"inference/{name}"] = sum(engine.get(name, 0.0) for engine in engines)
        now, before = time.monotonic(), self._generated
        self._generated = (
            now,
            {name: each.get("generation_tokens", 0.0) for name, each in self._engines.items()},
        )
        if before is not None:
            made = tokens_between(before[1], self._generated[1])
            metrics["inference/tokens_per_s"] = made / max(now - before[0], 1e-9)
        return metrics

    def _restart_stuck(
        self,
        members: Mapping[str, Engine],
        clock: StuckClock,
        engines: Mapping[str, Mapping[str, float]],
    ) -> None:
        for name in clock.look(time.monotonic(), engines):
            reason = f"it has requests and made no token for {clock.limit_s:.0f} s"
            logger.warning("%s is stuck: %s", name, reason)
            if name in members:
                self.fleet.request_restart(members[name], reason)

    def _steer(self) -> None:
        if self.concurrency is None or not self._engines:
            return
        counters = self.dispatcher.counters
        ended = counters.finished + counters.failed
        finished, self._ended = ended - self._ended, ended
        decision = self.concurrency.observe(
            load_of(list(self._engines.values())), in_flight=self.dispatcher.in_flight, finished=finished
        )
        self._verdicts[decision.verdict] += 1
        self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        if decision.limit != self.dispatcher.max_in_flight:
            logger.info("%s: %d rollouts may be in flight", decision.verdict.value, decision.limit)
            self.dispatcher.max_in_flight = decision.limit
        if decision.cancel:
            self.take_back(decision.cancel)


def tokens_between(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Of engines that both looks saw: one that missed the first brings its whole count, a restarted one begins anew."""
    return sum(max(0.0, count - before[name]) for name, count in after.items() if name in before)


def load_of(engines: list[dict[str, float]]) -> Load:
    """``engines`` as `Fleet.metrics` gives them."""

    def total(name: str) -> float:
        return sum(engine.get(name, 0.0) for engine in engines)

    return Load(
        num_engines=len(engines),
        kv_usage=total("kv_usage") / max(1, len(engines)),
        running=total("running"),
        waiting=total("waiting"),
        preemptions=total("preemptions"),
    )
