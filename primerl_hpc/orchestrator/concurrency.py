"""How many rollouts may be in flight, from what the engines say of themselves: a pure controller without clock or IO.

    controller = Concurrency(config, start=64, ceiling=1024)
    decision = controller.observe(Load(...), in_flight=60, finished=12)       # at every look at the engines
    decision.limit, decision.cancel                                           # permits from now on; rollouts to take back

Too few rollouts leave engines idle; too many fill the KV cache, and engines then throw work away (preemption) or let
it wait. Cache use is the mean over engines, smoothed. The first rule that applies decides:

    cut     use above 0.95: back to what fills 0.7; the youngest groups are taken back
    trim    use above 0.8: the same limit, reached by starting nothing; preemptions of more than a twentieth of the limit
            since the last change: × 0.8; a queue of more than half of what runs, at six looks in a row: down to a quarter
    grow    × 1.25 (× 2 while the cache is nearly empty), when use is below 0.6, nothing waits, and every permit is used
    hold    otherwise

Against thrashing: a change is let take effect before the next one. After growth as many rollouts must finish as may be
in flight; after a trim the surplus must be gone as well; only a cut may come after six looks. And the
limit does not grow back to where pressure was met until ten turnovers later, or until engines join or leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from primerl_hpc.recipe.rollout_schema import AdaptiveConcurrency

CUT_ABOVE, TRIM_ABOVE, TARGET, GROW_BELOW, EMPTY_BELOW = 0.95, 0.8, 0.7, 0.6, 0.3
GROWTH, GROWTH_WHEN_EMPTY, AFTER_PREEMPTION = 1.25, 2.0, 0.8
QUEUE_SHARE, QUEUE_TARGET, NO_QUEUE = 0.5, 0.25, 0.05  # waiting over running: too long, aimed at, none
PREEMPTED_SHARE = 0.05  # of the limit, since the last change: fewer cost less than a smaller limit
QUEUE_LOOKS, COOLDOWN_LOOKS = 6, 6
FAST, SLOW = 0.25, 0.08  # weight of the newest look in the smoothed use: for cuts, for the rest
USED_SHARE = 0.9  # of the permits, to grow
BELOW_PRESSURE = 0.9  # of the limit at which pressure was met: the ceiling until it is forgotten
FORGET_TURNOVERS = 10


class Verdict(Enum):
    GROW = "grow"
    HOLD = "hold"
    TRIM = "trim"
    CUT = "cut"


@dataclass(frozen=True)
class Load:
    """One look at the engines that answered."""

    num_engines: int
    kv_usage: float  # mean over the engines, in [0, 1]
    running: float  # requests, over all engines
    waiting: float
    preemptions: float  # counted since their start, over all engines


@dataclass(frozen=True)
class Decision:
    verdict: Verdict
    limit: int  # rollouts that may be in flight
    cancel: int = 0  # rollouts in flight to take back at once


class Concurrency:
    def __init__(self, config: AdaptiveConcurrency, *, start: int, ceiling: int) -> None:
        """Bounds are ``config.min`` and ``ceiling``; ``start`` is brought into them."""
        self.min, self.max = min(config.min, ceiling), ceiling
        self.limit = self._bounded(start)
        self._fast: float | None = None  # smoothed cache use
        self._slow: float | None = None
        self._known_bad: int | None = None  # a limit at which pressure was met
        self._to_finish = float(self.limit)  # rollouts, until the last change has taken effect
        self._turnovers = 0.0  # since pressure was met
        self._cooldown = self._queue_looks = 0
        self._preempted = 0.0  # requests, since the last change
        self._last: Load | None = None

    def observe(self, load: Load, *, in_flight: int, finished: int) -> Decision:
        """``finished``: rollouts that ended since the last look."""
        fast, usage = self._take_in(load, finished)
        at_work = in_flight * load.running / max(load.running + load.waiting, 1.0)  # what fills the cache
        is_drained = not self._cooldown and in_flight <= self.limit
        is_settled = is_drained and self._to_finish <= 0
        if fast > CUT_ABOVE and not self._cooldown:
            decision = self._shrink(at_work * TARGET / fast, Verdict.CUT)
            self._fast = self._slow = None
            return Decision(Verdict.CUT, decision.limit, cancel=max(0, in_flight - decision.limit))
        if usage > TRIM_ABOVE and is_settled:
            return self._shrink(at_work * TARGET / usage)
        if self._preempted > PREEMPTED_SHARE * self.limit and is_settled:
            return self._shrink(self.limit * AFTER_PREEMPTION)
        if self._queue_looks >= QUEUE_LOOKS and is_drained:
            return self._shrink(at_work * (1 + QUEUE_TARGET))
        is_idle = usage < GROW_BELOW and load.waiting <= NO_QUEUE * load.running and load.num_engines > 0
        if is_idle and is_settled and in_flight >= USED_SHARE * self.limit:
            return self._grow(GROWTH_WHEN_EMPTY if usage < EMPTY_BELOW else GROWTH)
        return Decision(Verdict.HOLD, self.limit)

    def _take_in(self, load: Load, finished: int) -> tuple[float, float]:
        """Cache use, smoothed a little and much."""
        last, self._last = self._last, load
        if last is not None and last.num_engines != load.num_engines:
            self._known_bad = self._fast = self._slow = None
            last = None  # an engine that missed a look brings its whole count back
        self._fast = _smoothed(self._fast, load.kv_usage, FAST)
        self._slow = _smoothed(self._slow, load.kv_usage, SLOW)
        self._to_finish -= finished
        self._turnovers += finished / max(1, self.limit)
        if self._turnovers > FORGET_TURNOVERS:
            self._known_bad = None
        self._cooldown = max(0, self._cooldown - 1)
        self._queue_looks = self._queue_looks + 1 if load.waiting > QUEUE_SHARE * load.running else 0
        self._preempted += max(0.0, load.preemptions - last.preemptions) if last is not None else 0.0
        return self._fast, self._slow

    def _grow(self, factor: float) -> Decision:
        ceiling = self.max
        if self._known_bad is not None:
            factor, ceiling = GROWTH, int(self._known_bad * BELOW_PRESSURE)
        grown = min(self._bounded(max(self.limit + 1, int(self.limit * factor))), ceiling)
        if grown <= self.limit:
            return Decision(Verdict.HOLD, self.limit)
        self.limit, self._to_finish, self._preempted = grown, float(grown), 0.0
        return Decision(Verdict.GROW, self.limit)

    def _shrink(self, limit: float, verdict: Verdict = Verdict.TRIM) -> Decision:
        """Never up: what is in flight may be more than the limit while an earlier trim drains."""
        self._known_bad, self._turnovers = self.limit, 0.0
        self.limit = min(self.limit, self._bounded(int(limit)))
        self._to_finish, self._preempted = float(self.limit), 0.0
        self._queue_looks, self._cooldown = 0, COOLDOWN_LOOKS
        return Decision(verdict, self.limit)

    def _bounded(self, limit: int) -> int:
        return max(self.min, min(self.max, limit))


def _smoothed(before: float | None, value: float, weight: float) -> float:
    return value if before is None else before + weight * (value - before)
