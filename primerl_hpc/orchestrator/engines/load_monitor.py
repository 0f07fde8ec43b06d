"""Poll the engines' metrics: for metrics of a step, stuck engines, and the limit on rollouts in flight."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from primerl_hpc.common.names import Role
from primerl_hpc.orchestrator.engines.fleet import Engine, Fleet
from primerl_hpc.orchestrator.scheduling.concurrency import (
    Concurrency,
    ConcurrencyDecision,
    LimitChange,
    Load,
)
from primerl_hpc.orchestrator.scheduling.dispatcher import Dispatcher

logger = logging.getLogger(__name__)

POLL_S = 2.0


@dataclass
class StuckDetector:
    """Finds engines that have requests but generate no token.

    Unresponsive engines are handled elsewhere.
    """

    limit_s: float
    _since: dict[str, tuple[float, float]] = field(default_factory=dict)  # tokens so far, and since when

    def update(self, now: float, engines: Mapping[str, Mapping[str, float]]) -> list[str]:
        """Return the engines that generated no token for longer than the limit.

        Each is returned once, and again after another such period.
        """
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

    def reset(self) -> None:
        """Restart all periods, because engines were paused."""
        self._since.clear()


class EngineMonitor:
    """Polls the engines, adjusts the dispatcher's limit and requests restarts of stuck engines."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        concurrency: Concurrency | None,
        *,
        is_updating: Callable[[], bool],
        cancel_youngest_rollouts: Callable[[int], None],
        stuck_after_s: float,
        frozen: Collection[Role] = (),
    ) -> None:
        """``concurrency`` None: the dispatcher's limit is fixed.

        ``cancel_youngest_rollouts(n)`` cancels at least n rollouts. ``stuck_after_s``: a restart is requested for an
        engine, of the policy or of the ``frozen`` roles, that has requests and generates no token for this long.
        """
        self.stuck = StuckDetector(stuck_after_s)
        self.frozen = {role: StuckDetector(stuck_after_s) for role in frozen}
        self.fleet, self.dispatcher, self.concurrency = fleet, dispatcher, concurrency
        self.is_updating, self.cancel_youngest_rollouts = is_updating, cancel_youngest_rollouts
        self._engines: dict[str, dict[str, float]] = {}
        self._generated: tuple[float, dict[str, float]] | None = None  # when, tokens by engine
        self._ended = self._num_polls = self._num_idle = 0
        self._num_changes = dict.fromkeys(LimitChange, 0)

    async def watch(self) -> None:
        """Poll forever."""
        while True:
            was_updating = self.is_updating()
            self._engines = await self.fleet.metrics()
            # paused with the others, but not part of the load
            prefill = await self.fleet.metrics(Role.PREFILL)
            self._num_polls += len(self._engines)
            self._num_idle += sum(not engine.get("running") for engine in self._engines.values())
            if was_updating or self.is_updating():  # the load of a paused engine is meaningless
                self.stuck.reset()
            else:
                self._steer()
                policy = await asyncio.to_thread(self.fleet.policy)
                self._restart_stuck(policy, self.stuck, self._engines | prefill)
            for role, detector in self.frozen.items():  # never paused
                members = await asyncio.to_thread(self.fleet.members, role)
                self._restart_stuck(members, detector, await self.fleet.metrics(role))
            await asyncio.sleep(POLL_S)

    def take_metrics(self) -> dict[str, float]:
        """Return metrics of the last poll; rates and shares since the last call.

        Polls nothing itself, because an engine that hangs must not delay a batch.
        """
        engines = list(self._engines.values())
        load = load_of(engines)
        metrics: dict[str, float] = {"inference/engines": load.num_engines}
        if self.concurrency is not None:
            metrics["concurrency/limit"] = self.concurrency.limit
            metrics |= {f"concurrency/{verdict.value}": count for verdict, count in self._num_changes.items()}
            self._num_changes = dict.fromkeys(LimitChange, 0)
        if self._num_polls:
            metrics["inference/idle"] = self._num_idle / self._num_polls
            self._num_polls = self._num_idle = 0
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
            {name: engine.get("generation_tokens", 0.0) for name, engine in self._engines.items()},
        )
        if before is not None:
            generated = tokens_between(before[1], self._generated[1])
            metrics["inference/tokens_per_s"] = generated / max(now - before[0], 1e-9)
        return metrics

    def _restart_stuck(
        self,
        members: Mapping[str, Engine],
        detector: StuckDetector,
        engines: Mapping[str, Mapping[str, float]],
    ) -> None:
        for name in detector.update(time.monotonic(), engines):
            reason = f"it has requests but generated no token for {detector.limit_s:.0f} s"
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
        self._num_changes[decision.verdict] += 1
        self._apply(decision)

    def _apply(self, decision: ConcurrencyDecision) -> None:
        if decision.limit != self.dispatcher.max_in_flight:
            logger.info(
                "concurrency %s: %d rollouts may be in flight", decision.verdict.value, decision.limit
            )
            self.dispatcher.max_in_flight = decision.limit
        if decision.cancel:
            self.cancel_youngest_rollouts(decision.cancel)


def tokens_between(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Return the tokens generated between two polls by the engines present in both.

    An engine that missed the first poll would contribute its full count; a restarted one counts from 0 again.
    """
    return sum(max(0.0, count - before[name]) for name, count in after.items() if name in before)


def load_of(engines: list[dict[str, float]]) -> Load:
    """Combine the metrics of engines, as `Fleet.metrics` returns them."""

    def total(name: str) -> float:
        return sum(engine.get(name, 0.0) for engine in engines)

    return Load(
        num_engines=len(engines),
        kv_usage=total("kv_usage") / max(1, len(engines)),
        running=total("running"),
        waiting=total("waiting"),
        preemptions=total("preemptions"),
    )
