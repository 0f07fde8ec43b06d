"""Looks at the engines' metrics every two seconds: for the numbers of a step, and for how many rollouts may be in flight."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from primerl_hpc.orchestrator.concurrency import Concurrency, Decision, Load, Verdict
from primerl_hpc.orchestrator.dispatcher import Dispatcher
from primerl_hpc.orchestrator.fleet import Fleet

logger = logging.getLogger(__name__)

LOOK_S = 2.0


class EngineWatch:
    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        concurrency: Concurrency | None,
        *,
        is_updating: Callable[[], bool],
        take_back: Callable[[int], None],
    ) -> None:
        """``concurrency`` None: the dispatcher's limit stays. ``take_back(n)`` cancels the youngest n rollouts or a few more."""
        self.fleet, self.dispatcher, self.concurrency = fleet, dispatcher, concurrency
        self.is_updating, self.take_back = is_updating, take_back
        self._engines: dict[str, dict[str, float]] = {}
        self._generated: tuple[float, float] | None = None
        self._ended = 0
        self._verdicts = dict.fromkeys(Verdict, 0)

    async def watch(self) -> None:
        while True:
            was_updating = self.is_updating()
            self._engines = await self.fleet.metrics()
            if not (was_updating or self.is_updating()):  # a paused engine says nothing about its load
                self._steer()
            await asyncio.sleep(LOOK_S)

    def take_metrics(self) -> dict[str, float]:
        """Of the last look (an engine that hangs must not hold a batch up); rates are since the last call."""
        engines = list(self._engines.values())
        load = load_of(engines)
        metrics: dict[str, float] = {"inference/engines": load.num_engines}
        if self.concurrency is not None:
            metrics["concurrency/limit"] = self.concurrency.limit
            metrics |= {f"concurrency/{verdict.value}": count for verdict, count in self._verdicts.items()}
            self._verdicts = dict.fromkeys(Verdict, 0)
        if not engines:
            return metrics
        metrics |= {
            "inference/running": load.running,
            "inference/waiting": load.waiting,
            "inference/preemptions": load.preemptions,
            "inference/kv_usage/mean": load.kv_usage,
            "inference/kv_usage/max": max(engine.get("kv_usage", 0.0) for engine in engines),
        }
        total = sum(engine.get("generation_tokens", 0.0) for engine in engines)
        now, before = time.monotonic(), self._generated
        self._generated = (now, total)
        if before is not None and total >= before[1]:
            metrics["inference/tokens_per_s"] = (total - before[1]) / max(now - before[0], 1e-9)
        return metrics

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
