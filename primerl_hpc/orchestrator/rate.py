"""So many per minute, in small bursts: a token bucket without a clock of its own."""

from __future__ import annotations

BURST_S = 6.0  # of permits that may be saved up
EPS = 1e-6  # sums of shares of a permit are not exact


class RateLimit:
    def __init__(self, per_minute: float) -> None:
        self.per_s = per_minute / 60.0
        self.capacity = max(1.0, self.per_s * BURST_S)
        self._tokens, self._at = self.capacity, 0.0

    def allows(self, now: float) -> bool:
        """Whether one more may begin at ``now``, in seconds of a clock that never goes back."""
        self._tokens = min(self.capacity, self._tokens + (now - self._at) * self.per_s)
        self._at = now
        return self._tokens >= 1.0 - EPS

    def take(self, now: float) -> None:
        """One began. Raises ValueError when it was not allowed."""
        if not self.allows(now):
            raise ValueError("more than the rate allows")
        self._tokens -= 1.0
