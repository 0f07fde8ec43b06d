"""Figures of a measured loop from the rows of its metrics files (`observe/metric_catalog.py` explains the names)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

Rows = Mapping[int, Mapping[str, float]]
"""Step → metrics of the step."""

_SECONDS = {
    "orchestrator": {
        "step": "time/step",
        "wait_for_policy": "time/wait_for_policy",
        "weight_update": "time/weight_update",
        "engines_paused": "time/engines_paused",
        "pack": "time/pack",
        "rollout": "rollout_s/mean",
    },
    "trainer": {
        "step": "time/step",
        "wait_for_batch": "time/wait_for_batch",
        "forward_backward": "time/forward_backward",
        "optimizer": "time/optimizer",
        "weights": "time/broadcast_weights",
    },
}
_MEANS = {
    "kv_use": "inference/kv_usage/mean",
    "engines_idle": "inference/idle",
    "requests_running": "inference/running",
    "requests_waiting": "inference/waiting",
    "staleness": "off_policy/mean",
    "errored_rollouts": "errored_rollouts/all",
    "event_loop_lag_p99_s": "event_loop_lag/p99",
    "reward": "reward/mean",
}


def loop_rates(orchestrator: Rows, trainer: Rows, *, warmup: int, last: int) -> dict[str, Any]:
    """Return rates, durations and shares of the steps ``warmup`` + 1 to ``last``.

    Rates are totals over those steps: finished rollouts and sampled tokens per second of wall-clock time. ``trainer``
    is empty if the loop had none; otherwise tokens/s of its training steps and the share of time without a batch are
    included.
    """
    measured = [row for step, row in orchestrator.items() if warmup < step <= last]
    trained = [row for step, row in trainer.items() if warmup < step <= last]
    wall_s = sum(row["time/step"] for row in measured)
    rollouts = sum(row["batch/rollouts"] for row in measured)
    sampled = sum(row["batch/rollouts"] * row["completion_tokens/mean"] for row in measured)
    shares = {"orchestrator_waits": sum(row["time/wait_for_policy"] for row in measured) / wall_s}
    rates: dict[str, Any] = {
        "rollouts_per_s": rollouts / wall_s,
        "sampled_tokens_per_s": sampled / wall_s,
        "packed_tokens_per_s": sum(row["batch/tokens"] for row in measured) / wall_s,
    }
    means = {
        name: statistics.mean(values)
        for name, metric in _MEANS.items()
        if (values := [row[metric] for row in measured if metric in row])
    }
    if not trained:  # no policy version ever arrives
        del means["staleness"]
    else:
        trainer_s = sum(row["time/step"] for row in trained)
        shares["trainer_waits"] = sum(row["time/wait_for_batch"] for row in trained) / trainer_s
        rates["trainer_tokens_per_s"] = statistics.median(row["perf/throughput"] for row in trained)
    return {
        "steps": len(measured),
        "rates": rates,
        "shares": shares,
        "means": means,
        "seconds": {
            role: found
            for role, rows in (("orchestrator", measured), ("trainer", trained))
            if (found := _durations(rows, _SECONDS[role]))
        },
    }


def _durations(rows: list[Mapping[str, float]], names: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Return median, lowest and highest of each duration."""
    found = {name: [row[metric] for row in rows if metric in row] for name, metric in names.items()}
    return {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in found.items()
        if values
    }
