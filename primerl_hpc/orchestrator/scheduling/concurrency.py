"""Control how many rollouts may be in flight, from the engines' load metrics. Pure: no clock and no I/O.

    controller = Concurrency(config, start=64, ceiling=1024)
    decision = controller.observe(Load(...), in_flight=60, finished=12)       # at every poll of the engines
    decision.limit, decision.cancel                                           # new limit; rollouts to cancel now

Too few rollouts leave engines idle; too many fill the KV cache, and engines then discard work (preemption) or let
requests wait. Cache usage is the mean over engines, smoothed. The first rule that applies decides:

    cut     usage above 0.95: reduce the limit to what fills 0.7; the youngest groups are cancelled
    trim    nothing is cancelled; in-flight rollouts drain to the new limit. Usage above 0.8: reduce the limit to what
            fills 0.7; more preemptions since the last change than a twentieth of the limit: × 0.8; a queue longer than
            half of the running requests at six polls in a row: reduce until it is a quarter
    grow    × 1.25 (× 2 while the cache is nearly empty) if usage is below 0.6, nothing waits, and every permit is used
    hold    otherwise

To avoid oscillation, a change must take effect before the next one: as many rollouts must finish as may be in flight,
and after a reduction six polls must pass and the surplus must finish. A cut waits only for the six polls; a trim
because of a queue does not wait for rollouts other than the surplus. The limit does not
grow back to where pressure was observed until ten turnovers later, or until engines join or leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from primerl_hpc.recipe.schema.rollout import AdaptiveConcurrency

CUT_ABOVE, TRIM_ABOVE, TARGET, GROW_BELOW, EMPTY_BELOW = 0.95, 0.8, 0.7, 0.6, 0.3
GROWTH, GROWTH_WHEN_EMPTY, AFTER_PREEMPTION = 1.25, 2.0, 0.8
QUEUE_SHARE, QUEUE_TARGET, NO_QUEUE = 0.5, 0.25, 0.05  # waiting / running: too long, target, none
PREEMPTED_SHARE = (
    0.05  # share of the limit since the last change: fewer preemptions cost less than a smaller limit
)
QUEUE_POLLS, COOLDOWN_POLLS = 6, 6
FAST, SLOW = 0.25, 0.08  # weight of the newest poll in the smoothed usage: for cuts, for all else
USED_SHARE = 0.9  # share of the permits that must be used to grow
BELOW_PRESSURE = 0.9  # ceiling, relative to the limit at which pressure was observed, until that is forgotten
FORGET_TURNOVERS = 10


class LimitChange(Enum):
    """Kinds of changes of the limit."""

    GROW = "grow"
    HOLD = "hold"
    TRIM = "trim"
    CUT = "cut"


@dataclass(frozen=True)
class Load:
    """Load of the engines that responded at one poll."""

    num_engines: int
    kv_usage: float  # mean over the engines, in [0, 1]
    running: float  # requests, over all engines
    waiting: float
    preemptions: float  # since the engines started, over all engines


@dataclass(frozen=True)
class ConcurrencyDecision:
    """The result of one poll."""

    verdict: LimitChange
    limit: int  # rollouts that may be in flight
    cancel: int = 0  # rollouts in flight to cancel now


class Concurrency:
    def __init__(self, config: AdaptiveConcurrency, *, start: int, ceiling: int) -> None:
        """Set up a controller with bounds ``config.min`` and ``ceiling``; ``start`` is clipped to them."""
        self.min, self.max = min(config.min, ceiling), ceiling
        self.limit = self._bounded(start)
        self._fast: float | None = None  # smoothed cache usage
        self._slow: float | None = None
        self._pressure_limit: int | None = None  # a limit at which pressure was observed
        # rollouts that must finish until the last change has taken effect
        self._to_finish = float(self.limit)
        self._turnovers = 0.0  # since pressure was observed
        self._cooldown = self._queue_polls = 0
        self._preempted = 0.0  # requests, since the last change
        self._last: Load | None = None

    def observe(self, load: Load, *, in_flight: int, finished: int) -> ConcurrencyDecision:
        """Return the limit after one poll. ``finished``: rollouts that ended since the previous poll."""
        fast, usage = self._update(load, finished)
        # rollouts that fill the cache
        num_active = in_flight * load.running / max(load.running + load.waiting, 1.0)
        is_drained = not self._cooldown and in_flight <= self.limit
        is_settled = is_drained and self._to_finish <= 0
        if fast > CUT_ABOVE and not self._cooldown:
            decision = self._shrink(num_active * TARGET / fast, LimitChange.CUT)
            self._fast = self._slow = None
            return ConcurrencyDecision(
                LimitChange.CUT, decision.limit, cancel=max(0, in_flight - decision.limit)
            )
        if usage > TRIM_ABOVE and is_settled:
            return self._shrink(num_active * TARGET / usage)
        if self._preempted > PREEMPTED_SHARE * self.limit and is_settled:
            return self._shrink(self.limit * AFTER_PREEMPTION)
        if self._queue_polls >= QUEUE_POLLS and is_drained:
            return self._shrink(num_active * (1 + QUEUE_TARGET))
        is_idle = usage < GROW_BELOW and load.waiting <= NO_QUEUE * load.running and load.num_engines > 0
        if is_idle and is_settled and in_flight >= USED_SHARE * self.limit:
            return self._grow(GROWTH_WHEN_EMPTY if usage < EMPTY_BELOW else GROWTH)
        return ConcurrencyDecision(LimitChange.HOLD, self.limit)

    def _update(self, load: Load, finished: int) -> tuple[float, float]:
        """Update the smoothed state and return the cache usage with light and with heavy smoothing."""
        last, self._last = self._last, load
        if last is not None and last.num_engines != load.num_engines:
            self._pressure_limit = self._fast = self._slow = None
            last = None  # an engine that missed a poll returns with its full count
        self._fast = _smoothed(self._fast, load.kv_usage, FAST)
        self._slow = _smoothed(self._slow, load.kv_usage, SLOW)
        self._to_finish -= finished
        self._turnovers += finished / max(1, self.limit)
        if self._turnovers > FORGET_TURNOVERS:
            self._pressure_limit = None
        self._cooldown = max(0, self._cooldown - 1)
        self._queue_polls = self._queue_polls + 1 if load.waiting > QUEUE_SHARE * load.running else 0
        self._preempted += max(0.0, load.preemptions - last.preemptions) if last is not None else 0.0
        return self._fast, self._slow

    def _grow(self, factor: float) -> ConcurrencyDecision:
        ceiling = self.max
        if self._pressure_limit is not None:
            factor, ceiling = GROWTH, int(self._pressure_limit * BELOW_PRESSURE)
        grown = min(self._bounded(max(self.limit + 1, int(self.limit * factor))), ceiling)
        if grown <= self.limit:
            return ConcurrencyDecision(LimitChange.HOLD, self.limit)
        self.limit, self._to_finish, self._preempted = grown, float(grown), 0.0
        return ConcurrencyDecision(LimitChange.GROW, self.limit)

    def _shrink(self, limit: float, verdict: LimitChange = LimitChange.TRIM) -> ConcurrencyDecision:
        """Reduce the limit; never raise it: more than the limit may be in flight while an earlier trim takes effect."""
        self._pressure_limit, self._turnovers = self.limit, 0.0
        self.limit = min(self.limit, self._bounded(int(limit)))
        self._to_finish, self._preempted = float(self.limit), 0.0
        self._queue_polls, self._cooldown = 0, COOLDOWN_POLLS
        return ConcurrencyDecision(verdict, self.limit)

    def _bounded(self, limit: int) -> int:
        return max(self.min, min(self.max, limit))


def _smoothed(before: float | None, value: float, weight: float) -> float:
    return value if before is None else before + weight * (value - before)
