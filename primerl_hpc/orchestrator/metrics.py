"""Metrics of a batch, under the names common in the field (reward/…, off_policy/…, time/…).

Names end in ``/mean``, ``/max`` …; a metric of one environment is ``<name>/<environment>/mean``. The names
``empty_rollouts``, ``errored_rollouts`` and ``seq_len`` have ``all`` in place of an environment.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from primerl_hpc.common.names import Role, process_name
from primerl_hpc.orchestrator.batches.batcher import Batch
from primerl_hpc.orchestrator.rollout_data import AgentTrace, Rollout, ScoredGroup
from primerl_hpc.orchestrator.scheduling.dispatcher import Dispatcher
from primerl_hpc.plan.plan import PhasePlan
from primerl_hpc.run.metrics import HighErrorRate, high_error_rates, read_last_steps
from primerl_hpc.run.rundir import RunDir

logger = logging.getLogger(__name__)
KEPT_BATCHES = 40
"""Batches in which `ErrorRateWatch` looks for those of one environment."""


def distribution(name: str, values: ArrayLike) -> dict[str, float]:
    """Return mean, min, max, p10 and p90 of ``values``; empty without values."""
    array = np.asarray(values, dtype=np.float64)
    if not array.size:
        return {}
    p10, p90 = np.percentile(array, [10, 90])
    return {
        f"{name}/mean": float(array.mean()),
        f"{name}/min": float(array.min()),
        f"{name}/max": float(array.max()),
        f"{name}/p10": float(p10),
        f"{name}/p90": float(p90),
    }


def share(name: str, flags: list[bool]) -> dict[str, float]:
    """Return the mean of ``flags``; empty without flags."""
    return {f"{name}/mean": float(np.mean(flags))} if flags else {}


def group_metrics(groups: list[ScoredGroup], suffix: str = "", num_lost: int = 0) -> dict[str, float]:
    """Return rewards, lengths, turns, branches, truncation and errors of the rollouts of ``groups``.

    ``suffix`` is ``/<env>``. ``num_lost``: rollouts of further groups in which none succeeded.
    """
    label = suffix.removeprefix("/") or "all"
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [rollout.input_tokens + rollout.output_tokens for rollout in rollouts]
    failed = num_lost + sum(group.num_failed for group in groups)
    metrics = {
        **distribution(f"reward{suffix}", [rollout.reward for rollout in rollouts]),
        **distribution(f"completion_tokens{suffix}", [rollout.output_tokens for rollout in rollouts]),
        **distribution(f"prompt_tokens{suffix}", [rollout.input_tokens for rollout in rollouts]),
        **distribution(f"turns{suffix}", [rollout.num_turns for rollout in rollouts]),
        **distribution(f"branches{suffix}", [len(rollout.samples) for rollout in rollouts]),
        **share(f"truncated{suffix}", [rollout.is_truncated for rollout in rollouts]),
        **share(f"control_text{suffix}", [rollout.has_control_text for rollout in rollouts]),
        f"control_text{suffix}/count": float(sum(rollout.has_control_text for rollout in rollouts)),
        f"errored_rollouts/{label}": failed / max(1, failed + len(rollouts)),
        f"empty_rollouts/{label}": float(
            np.mean([rollout.output_tokens == 0 for rollout in rollouts] or [0])
        ),
        f"seq_len/{label}/mean": float(np.mean(lengths or [0])),
        f"seq_len/{label}/max": float(max(lengths, default=0)),
        **distribution(f"rollout_s{suffix}", [rollout.seconds for rollout in rollouts]),
        **solved_metrics(groups, suffix),
        **agent_metrics(rollouts, suffix),
    }
    for kind in ("rewards", "metrics"):
        names = sorted({name for rollout in rollouts for name in getattr(rollout, kind)})
        for name in names:
            values = [getattr(rollout, kind)[name] for rollout in rollouts if name in getattr(rollout, kind)]
            metrics[f"{kind}{suffix}/{name}/mean"] = float(np.mean(values))
    return metrics


def effective_metrics(groups: list[ScoredGroup], suffix: str = "") -> dict[str, float]:
    """Return metrics of only the rollouts that have a training signal."""
    rollouts = [
        rollout
        for group in groups
        for rollout, samples in zip(group.rollouts, group.samples, strict=True)
        if any(sample.has_signal for sample in samples)
    ]
    return {
        **distribution(f"effective/reward{suffix}", [rollout.reward for rollout in rollouts]),
        **distribution(
            f"effective/completion_tokens{suffix}", [rollout.output_tokens for rollout in rollouts]
        ),
        **distribution(f"effective/turns{suffix}", [rollout.num_turns for rollout in rollouts]),
        **distribution(f"effective/branches{suffix}", [len(rollout.samples) for rollout in rollouts]),
        **share(f"effective/truncated{suffix}", [rollout.is_truncated for rollout in rollouts]),
    }


def disk_metrics(folder: Path) -> dict[str, float]:
    """Return the free space of the filesystem of checkpoints and weights; empty after an error.

    Blocks while a network filesystem does not respond.
    """
    try:
        total, _, free = shutil.disk_usage(folder)
    except OSError:  # a transient error must not end the run for a metric
        return {}
    return {"system/ckpt_disk_free_gib": free / 2**30, "system/ckpt_disk_used_share": 1 - free / total}


def agent_metrics(rollouts: list[Rollout], suffix: str) -> dict[str, float]:
    """Return ``reward/<env>/<agent>/…``, ``turns/<env>/<agent>/…``, … if there are several agents."""
    by_agent: dict[str, list[tuple[AgentTrace, int]]] = {}
    for rollout in rollouts:
        branches = Counter(sample.trace for sample in rollout.samples)
        for index, trace in enumerate(rollout.traces):
            by_agent.setdefault(trace.agent, []).append((trace, branches[index]))
    metrics: dict[str, float] = {}
    for agent, traces in sorted(by_agent.items()) if len(by_agent) > 1 else ():
        name = f"{suffix}/{agent}"
        metrics |= {
            **distribution(f"reward{name}", [trace.reward for trace, _ in traces]),
            **distribution(f"completion_tokens{name}", [trace.output_tokens for trace, _ in traces]),
            **distribution(f"prompt_tokens{name}", [trace.input_tokens for trace, _ in traces]),
            **distribution(f"turns{name}", [trace.num_turns for trace, _ in traces]),
            **distribution(f"branches{name}", [count for _, count in traces]),
            **share(f"truncated{name}", [trace.is_truncated for trace, _ in traces]),
        }
    return metrics


def solved_metrics(groups: list[ScoredGroup], suffix: str = "") -> dict[str, float]:
    """Return the shares of groups in which no, every, or some rollout got the full reward of 1."""
    counts = [
        sum(is_solved(rollout.reward) for rollout in group.rollouts) / len(group.rollouts) for group in groups
    ]
    shares = np.asarray(counts)
    return {
        f"solve_none{suffix}": float((shares == 0).mean()),
        f"solve_all{suffix}": float((shares == 1).mean()),
        f"solve_some{suffix}": float(((shares > 0) & (shares < 1)).mean()),
    }


def is_solved(reward: float) -> bool:
    """True if the reward counts as solved for pass@k and solve_*: the full reward of 1 or more."""
    return reward >= 1 - 1e-6


def batch_metrics(batch: Batch, dispatcher: Dispatcher) -> dict[str, float]:
    """Return all metrics of one batch except times."""
    step, packed = batch.info.step, batch.packed
    num_rollouts = sum(len(group.rollouts) for group in batch.groups)
    # rollouts of a frozen model have no age
    ages = [
        (step - 1) - version for group in batch.groups if not group.is_frozen for version in group.versions
    ]
    names = batch.info.env_names
    lost = batch.tally.lost_rollouts
    metrics = group_metrics(batch.generated, num_lost=lost.total()) | effective_metrics(batch.groups)
    for env, name in enumerate(names):
        if own := [group for group in batch.generated if group.task.env == env]:
            metrics |= group_metrics(own, f"/{name}", lost[env]) | effective_metrics(own, f"/{name}")
            metrics[f"batch/{name}/ratio"] = float(np.mean([group.task.env == env for group in batch.groups]))
        elif lost[env]:
            metrics[f"errored_rollouts/{name}"] = 1.0
    metrics |= {
        "batch/rollouts": num_rollouts,
        "batch/samples": batch.info.num_samples,
        "batch/trainable": sum(
            any(sample.has_signal for sample in samples)
            for group in batch.groups
            for samples in group.samples
        )
        / num_rollouts,
        "batch/groups_without_signal": sum(not group.has_signal for group in batch.groups),
        "batch/groups_refilled": batch.tally.refilled_groups,
        "batch/groups_rejected": batch.tally.rejected_groups,
        "batch/groups_failed": batch.tally.failed_groups,
        "batch/rollouts_passed_over": sum(len(group.rollouts) for group in batch.tally.passed_over),
        "off_policy/mean": float(np.mean(ages or [0])),
        "off_policy/max": float(max(ages, default=0)),
        "off_policy/dropped": batch.tally.stale_rollouts,
    }
    if packed is not None:
        rows = [row for rank in packed.ranks for row in rank]
        metrics |= {
            "packing/rows": len(rows),
            "packing/fill": packed.fill,
            "packing/dummies": packed.num_dummies,
            "packing/truncated": packed.num_truncated,
            "packing/untrainable": packed.num_untrainable,
            "batch/tokens": sum(row.num_tokens for row in rows),
            "batch/trained_tokens": sum(
                int(np.count_nonzero(row.loss_mask | (row.weights("ce") != 0))) for row in rows
            ),
        }
    for location, versions in (
        ("in_flight", dispatcher.versions_in_flight()),
        ("in_queue", batch.queued_versions),
    ):
        if versions:
            lags = [dispatcher.version - version for version in versions]
            metrics[f"off_policy/{location}/mean"] = float(np.mean(lags))
            metrics[f"off_policy/{location}/max"] = float(max(lags))
    metrics |= {f"dispatcher/{name}": value for name, value in asdict(dispatcher.counters).items()}
    metrics["dispatcher/in_flight"] = dispatcher.in_flight
    return metrics


class ErrorRateWatch:
    """Warns when the rollouts of an environment fail in many consecutive batches (`run.metrics.high_error_rates`)."""

    def __init__(self, run: RunDir, phase: PhasePlan) -> None:
        """Continue with the batches before a restart or resume."""
        self.logs = dict[str, str]()
        logs = {process.name: process.log for process in phase.of_role(Role.ENV_SERVER)}
        for index, (split, environment) in enumerate(phase.recipe.environments.by_server):
            log = logs.get(process_name(Role.ENV_SERVER, index))
            if split == "train" and log is not None:
                self.logs.setdefault(environment.label, str(run.latest_logs / log))
        earlier = read_last_steps(run.metrics("orchestrator"), KEPT_BATCHES).values()
        self._rows = deque[Mapping[str, Any]](earlier, maxlen=KEPT_BATCHES)
        self.found = high_error_rates(self._rows, self.logs)

    def observe(self, metrics: Mapping[str, float]) -> list[HighErrorRate]:
        """Return the environments whose rollouts fail, after one more batch; log those that are new."""
        self._rows.append(metrics)
        known = {rate.environment for rate in self.found}
        self.found = high_error_rates(self._rows, self.logs)
        for rate in self.found:
            if rate.environment not in known:
                logger.warning("%s", rate.sentence)
        return self.found


class Stopwatch:
    """Sums the time for which a condition holds."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._total_s = 0.0

    def observe(self, holds: bool, now: float) -> None:
        """Record whether the condition holds at ``now`` (seconds of a monotonic clock)."""
        if self._since is not None:
            self._total_s += now - self._since
        self._since = now if holds else None

    def take(self) -> float:
        """Return the seconds since the last call."""
        total_s, self._total_s = self._total_s, 0.0
        return total_s


class LoopLag:
    """Measures how late the event loop runs scheduled callbacks; large values mean that the orchestrator lacks CPU."""

    def __init__(self, interval_s: float = 0.25) -> None:
        self.interval_s = interval_s
        self._lags: list[float] = []

    async def watch(self) -> None:
        """Measure forever."""
        while True:
            start = time.monotonic()
            await asyncio.sleep(self.interval_s)
            self._lags.append(max(0.0, time.monotonic() - start - self.interval_s))

    def take(self) -> dict[str, float]:
        """Return metrics since the last call."""
        lags, self._lags = self._lags, []
        if not lags:
            return {}
        return {
            "event_loop_lag/mean": float(np.mean(lags)),
            "event_loop_lag/p99": float(np.percentile(lags, 99)),
            "event_loop_lag/max": float(max(lags)),
        }
