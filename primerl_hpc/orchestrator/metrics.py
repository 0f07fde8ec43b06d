"""What a batch says about the run, under the metric names of the field (reward/…, off_policy/…, time/…).

Names end in ``/mean``, ``/max`` … ; a part about one environment is ``<name>/<environment>/mean``.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from primerl_hpc.orchestrator.batches import Cut
from primerl_hpc.orchestrator.dispatcher import Dispatcher
from primerl_hpc.orchestrator.scoring import ScoredGroup
from primerl_hpc.orchestrator.trajectories import AgentTrace, Rollout


def distribution(name: str, values: ArrayLike) -> dict[str, float]:
    """mean, min, max, p10 and p90 of ``values``; nothing when there are none."""
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
    """mean of ``flags``; nothing when there are none."""
    return {f"{name}/mean": float(np.mean(flags))} if flags else {}


def group_metrics(groups: list[ScoredGroup], suffix: str = "", num_lost: int = 0) -> dict[str, float]:
    """Rewards, lengths, turns, branches, truncation and errors over the rollouts of ``groups``; ``suffix`` is ``/<env>``.

    ``num_lost``: rollouts of groups that are not among them, because none of theirs survived.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    failed = num_lost + sum(group.num_failed for group in groups)
    metrics = {
        **distribution(f"reward{suffix}", [rollout.reward for rollout in rollouts]),
        **distribution(f"completion_tokens{suffix}", [rollout.output_tokens for rollout in rollouts]),
        **distribution(f"prompt_tokens{suffix}", [rollout.input_tokens for rollout in rollouts]),
        **distribution(f"turns{suffix}", [rollout.num_turns for rollout in rollouts]),
        **distribution(f"branches{suffix}", [len(rollout.samples) for rollout in rollouts]),
        **share(f"truncated{suffix}", [rollout.is_truncated for rollout in rollouts]),
        f"errors{suffix}/mean": failed / max(1, failed + len(rollouts)),
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
    """Of those rollouts alone that something is learnt from."""
    rollouts = [
        rollout
        for group in groups
        for rollout, samples in zip(group.rollouts, group.samples, strict=True)
        if any(sample.has_signal for sample in samples)
    ]
    return {
        **distribution(f"effective/reward{suffix}", [rollout.reward for rollout in rollouts]),
        **distribution(f"effective/completion_tokens{suffix}", [each.output_tokens for each in rollouts]),
        **distribution(f"effective/turns{suffix}", [rollout.num_turns for rollout in rollouts]),
        **distribution(f"effective/branches{suffix}", [len(rollout.samples) for rollout in rollouts]),
        **share(f"effective/truncated{suffix}", [rollout.is_truncated for rollout in rollouts]),
    }


def disk_metrics(folder: Path) -> dict[str, float]:
    """Of the filesystem that checkpoints and weights go to. Blocks while a network filesystem does not answer."""
    try:
        total, _, free = shutil.disk_usage(folder)
    except OSError:  # it falters, and this is a number for people
        return {}
    return {"system/ckpt_disk_free_gib": free / 2**30, "system/ckpt_disk_used_share": 1 - free / total}


def agent_metrics(rollouts: list[Rollout], suffix: str) -> dict[str, float]:
    """``reward/<env>/<agent>/…``, ``turns/<env>/<agent>/…``, … where there are several agents."""
    played: dict[str, list[tuple[AgentTrace, int]]] = {}
    for rollout in rollouts:
        branches = Counter(sample.trace for sample in rollout.samples)
        for index, trace in enumerate(rollout.traces):
            played.setdefault(trace.agent, []).append((trace, branches[index]))
    metrics: dict[str, float] = {}
    for agent, traces in sorted(played.items()) if len(played) > 1 else ():
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
    """Shares of groups in which no, every, or some rollout got the full reward of 1."""
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
    """A rollout counts as solved for pass@k and solve_* from the full reward of 1 on."""
    return reward >= 1 - 1e-6


def batch_metrics(cut: Cut, dispatcher: Dispatcher) -> dict[str, float]:
    """Everything about one batch but times."""
    step, packed = cut.info.step, cut.packed
    num_rollouts = sum(len(group.rollouts) for group in cut.groups)
    # a frozen model's rollouts have no age
    ages = [(step - 1) - version for group in cut.groups if not group.is_frozen for version in group.versions]
    names = cut.info.env_names
    lost = cut.tally.lost_rollouts
    metrics = group_metrics(cut.generated, num_lost=lost.total()) | effective_metrics(cut.groups)
    for env, name in enumerate(names):
        if own := [group for group in cut.generated if group.task.env == env]:
            metrics |= group_metrics(own, f"/{name}", lost[env]) | effective_metrics(own, f"/{name}")
            metrics[f"batch/{name}/ratio"] = float(np.mean([group.task.env == env for group in cut.groups]))
        elif lost[env]:
            metrics[f"errors/{name}/mean"] = 1.0
    metrics |= {
        "batch/rollouts": num_rollouts,
        "batch/samples": cut.info.num_samples,
        "batch/trainable": sum(
            any(sample.has_signal for sample in each) for group in cut.groups for each in group.samples
        )
        / num_rollouts,
        "batch/groups_without_signal": sum(not group.has_signal for group in cut.groups),
        "batch/groups_refilled": cut.tally.refilled_groups,
        "batch/groups_rejected": cut.tally.rejected_groups,
        "batch/groups_failed": cut.tally.failed_groups,
        "batch/rollouts_passed_over": sum(len(group.rollouts) for group in cut.tally.passed_over),
        "off_policy/mean": float(np.mean(ages or [0])),
        "off_policy/max": float(max(ages, default=0)),
        "off_policy/dropped": cut.tally.stale_rollouts,
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
    for where, versions in (
        ("in_flight", dispatcher.versions_in_flight()),
        ("in_queue", cut.queued_versions),
    ):
        if versions:
            lags = [dispatcher.version - version for version in versions]
            metrics[f"off_policy/{where}/mean"] = float(np.mean(lags))
            metrics[f"off_policy/{where}/max"] = float(max(lags))
    metrics |= {f"dispatcher/{name}": value for name, value in asdict(dispatcher.counters).items()}
    metrics["dispatcher/in_flight"] = dispatcher.in_flight
    return metrics


class LoopLag:
    """How late the event loop runs what is due: the sign of an orchestrator that is out of CPU."""

    def __init__(self, interval_s: float = 0.25) -> None:
        self.interval_s = interval_s
        self._lags: list[float] = []

    async def watch(self) -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(self.interval_s)
            self._lags.append(max(0.0, time.monotonic() - start - self.interval_s))

    def take(self) -> dict[str, float]:
        lags, self._lags = self._lags, []
        if not lags:
            return {}
        return {
            "event_loop_lag/mean": float(np.mean(lags)),
            "event_loop_lag/p99": float(np.percentile(lags, 99)),
            "event_loop_lag/max": float(max(lags)),
        }
