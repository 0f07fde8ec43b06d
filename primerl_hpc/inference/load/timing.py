"""Times of streamed requests, and their summary.

TTFT: from sending a request to its first token. ITL: between two tokens of a request; tokens that arrive together share
the time since the previous ones. TPOT: mean ITL of a request. The names are those of ``vllm bench serve``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class RequestTimes:
    """One request. Times are in seconds of the same monotonic clock."""

    num_prompt: int
    sent_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """(time, number of tokens) of each part of the response."""
    error: str | None = None
    """Why the request failed; None: all requested tokens arrived."""

    @property
    def num_output(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0][0] - self.sent_s

    @property
    def latency_s(self) -> float:
        return self.arrivals[-1][0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first arrivals; None if all tokens arrived together."""
        later = self.num_output - self.arrivals[0][1]
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / later if later else None

    def itls_s(self) -> list[float]:
        """Return the time before each token that did not arrive with the first one."""
        gaps: list[float] = []
        for (before, _), (now, count) in zip(self.arrivals, self.arrivals[1:], strict=False):
            gaps += [(now - before) / count] * count
        return gaps


def summarize_requests(requests: Sequence[RequestTimes]) -> dict[str, Any]:
    """Return rates and distributions of one level. Only complete requests count, except in ``failed``."""
    done = [request for request in requests if request.error is None]
    errors = [request.error for request in requests if request.error is not None]
    found: dict[str, Any] = {
        "requests": len(requests),
        "failed": len(errors),
        "error": next(iter(errors), None),
    }
    if not done:
        return found
    begin = min(request.sent_s for request in requests)
    duration_s = max(request.arrivals[-1][0] for request in done) - begin
    prompt, output = (
        sum(getattr(request, name) for request in done) for name in ("num_prompt", "num_output")
    )
    return found | {
        "duration_s": duration_s,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": len(done) / duration_s,
        "output_tokens_per_s": output / duration_s,
        "tokens_per_s": (prompt + output) / duration_s,
        "ttft_s": spread([request.ttft_s for request in done]),
        "itl_s": spread([gap for request in done for gap in request.itls_s()]),
        "tpot_s": spread([request.tpot_s for request in done if request.tpot_s is not None]),
        "latency_s": spread([request.latency_s for request in done]),
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean, median, 90th and 99th percentile and maximum; None without values."""
    if not values:
        return None
    median, p90, p99 = np.percentile(values, [50, 90, 99])
    return {
        "mean": float(np.mean(values)),
        "median": float(median),
        "p90": float(p90),
        "p99": float(p99),
        "max": float(max(values)),
    }


def summarize_engines(samples: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Summarize the metrics of all engines, read repeatedly during a level.

    ``kv_use``: share of the KV cache, mean over engines and maximum. ``running``, ``waiting``: requests in all engines.
    ``preemptions``: during the level.
    """
    looks = [list(sample.values()) for sample in samples if sample]
    if not looks:
        return {}
    kv_use = [engine.get("kv_usage", 0.0) for look in looks for engine in look]
    totals = {
        name: [sum(engine.get(name, 0.0) for engine in look) for look in looks]
        for name in ("running", "waiting", "preemptions")
    }
    return {
        "kv_use": {"mean": float(np.mean(kv_use)), "max": max(kv_use)},
        "running": {"mean": float(np.mean(totals["running"])), "max": max(totals["running"])},
        "waiting": {"mean": float(np.mean(totals["waiting"])), "max": max(totals["waiting"])},
        "preemptions": totals["preemptions"][-1] - totals["preemptions"][0],
    }
