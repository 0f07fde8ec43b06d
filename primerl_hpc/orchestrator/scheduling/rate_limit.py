"""Limit how many rollouts start per minute, with small bursts: a token bucket without a clock of its own."""

from __future__ import annotations

BURST_S = 6.0  # seconds of unused permits that accumulate
EPS = 1e-6  # sums of fractions of a permit are not exact


class RateLimit:
    def __init__(self, per_minute: float) -> None:
        self.per_s = per_minute / 60.0
        self.capacity = max(1.0, self.per_s * BURST_S)
        self._tokens, self._at = self.capacity, 0.0

    def allows(self, now: float) -> bool:
        """True if one more may start at ``now`` (seconds of a monotonic clock)."""
        self._tokens = min(self.capacity, self._tokens + (now - self._at) * self.per_s)
        self._at = now
        return self._tokens >= 1.0 - EPS

    def take(self, now: float) -> None:
        """Count one start. Raises ValueError if `allows` is false."""
        if not self.allows(now):
            raise ValueError("the rate limit allows no start now")
        self._tokens -= 1.0
