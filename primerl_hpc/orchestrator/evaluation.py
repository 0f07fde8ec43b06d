"""Evaluate policy versions on held-out tasks. Evaluations share the permits with training and are never cancelled.

Version v0 (on request), every ``interval``-th version and the last one are evaluated. One evaluation covers all
environments that are due at a version; its row in ``metrics/eval.jsonl`` has the version as its step. Its rollouts
start before training continues; if the policy changes meanwhile, ``eval/policy_version/max`` shows it. If a teacher
samples for training, the policy does not change meanwhile.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from math import comb
from typing import Any

import numpy as np

from primerl_hpc.orchestrator.metrics import distribution, is_solved, share
from primerl_hpc.orchestrator.rollout_data import Group, Rollout
from primerl_hpc.orchestrator.scheduling.dispatcher import Dispatcher
from primerl_hpc.recipe.schema.rollout import Environments, EvalEnvironment

OVERALL = "all"  # label of the metrics over all environments, if there are several and all are evaluated


def is_due(environment: EvalEnvironment, version: int, *, on_start: bool, last_version: int) -> bool:
    """True if the environment is evaluated at ``version``."""
    if version == 0:
        return on_start or last_version == 0
    return version == last_version or version % environment.interval == 0


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that at least one of k of n rollouts, c of them solved, is solved: 1 - C(n-c,k)/C(n,k).

    Source: arXiv 2107.03374 eq. 1.
    """
    return 1.0 - comb(n - c, k) / comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Return the probability that all of k of n rollouts are solved: C(c,k)/C(n,k) (τ-bench, arXiv 2406.12045)."""
    return comb(c, k) / comb(n, k)


def eval_metrics(label: str, samples: int | None, groups: list[Group]) -> dict[str, float]:
    """Return metrics of one environment's tasks.

    avg@k, pass@k and pass^k count a rollout that reached a limit (context, time) as unsolved with reward 0;
    ``avg_finished@k`` leaves it out. A rollout that failed because of a server or environment counts only in
    ``errors``.
    ``samples`` None: several environments with different numbers of samples, for which avg@k, pass@k and pass^k are
    undefined.
    """
    rollouts: list[Rollout] = [rollout for group in groups for rollout in group.results]
    num_failed = sum(group.num_failed for group in groups)
    name = f"eval/{label}"
    metrics: dict[str, float] = {
        f"{name}/tasks": len(groups),
        f"{name}/rollouts": len(rollouts),
        f"{name}/errors": num_failed,
        f"{name}/errors/mean": num_failed / max(1, num_failed + len(rollouts)),
        f"{name}/limited": sum(group.num_limited for group in groups),
    }
    if not rollouts:
        return metrics
    metrics |= {
        **distribution(f"{name}/reward", [rollout.reward for rollout in rollouts]),
        **distribution(f"{name}/completion_tokens", [rollout.output_tokens for rollout in rollouts]),
        **distribution(f"{name}/prompt_tokens", [rollout.input_tokens for rollout in rollouts]),
        **distribution(f"{name}/turns", [rollout.num_turns for rollout in rollouts]),
        # an external server returns no tokens, so the branches of its rollouts are unknown
        **distribution(f"{name}/branches", [len(rollout.samples) for rollout in rollouts if rollout.samples]),
        **share(f"{name}/truncated", [rollout.is_truncated for rollout in rollouts]),
    }
    return metrics if samples is None else metrics | _solved(name, samples, groups)


def _solved(name: str, samples: int, groups: list[Group]) -> dict[str, float]:
    rewards = [[float(rollout.reward) for rollout in group.results] for group in groups]
    strict = [[*found, *[0.0] * group.num_limited] for found, group in zip(rewards, groups, strict=True)]
    metrics = {
        f"{name}/avg@{samples}": _mean_of_means(strict),
        f"{name}/avg_finished@{samples}": _mean_of_means(rewards),
    }
    counts = [(len(found), sum(map(is_solved, found))) for found in strict]
    k = 1
    while k <= samples:
        if enough := [(n, c) for n, c in counts if n >= k]:
            metrics[f"{name}/pass@{k}"] = float(np.mean([pass_at_k(n, c, k) for n, c in enough]))
            metrics[f"{name}/pass^{k}"] = float(np.mean([pass_hat_k(n, c, k) for n, c in enough]))
        k *= 2
    return metrics


def _mean_of_means(rewards: list[list[float]]) -> float:
    """Return the mean over the tasks that have rewards."""
    return float(np.mean([np.mean(found) for found in rewards if found]))


@dataclass
class OpenEvaluation:
    """An evaluation in progress: one policy version's tasks in all environments that are due."""

    version: int
    num_open: int
    started: float = field(default_factory=time.monotonic)
    groups: dict[int, list[Group]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)  # of finished environments


class Evaluator:
    """Opens evaluations and collects their results."""

    def __init__(
        self, environments: Environments, task_counts: list[int], last_version: int, evaluated: set[int]
    ) -> None:
        """``task_counts[e]``: tasks of eval environment e. ``evaluated``: versions that already have a row."""
        self.environments, self.task_counts = environments, task_counts
        self.last_version, self.evaluated = last_version, evaluated
        self.open_versions: set[int] = set()
        self.interrupted: list[int] = []  # versions that an earlier incarnation did not finish, ascending

    @property
    def num_open(self) -> int:
        return len(self.open_versions)

    @property
    def unfinished(self) -> list[int]:
        """Versions whose evaluation was started, in this or an earlier incarnation, and is not finished."""
        return sorted({*self.open_versions, *self.interrupted})

    def state(self, live: int) -> dict[str, Any]:
        """Return the unfinished evaluations while version ``live`` is live; JSON-able, for a checkpoint."""
        return {"open": sorted(self.open_versions), "live": live}

    def restore(self, state: dict[str, Any], resumed: int) -> None:
        """Find the unfinished evaluations before version ``resumed``, which is evaluated when it is live again."""
        started_since = range(state["live"] + 1, resumed)
        self.interrupted = [
            version for version in sorted({*state["open"], *started_since} - {resumed}) if self.due(version)
        ]

    def due(self, version: int) -> list[int]:
        """Return the indices of the eval environments to run at ``version``."""
        if version in self.evaluated:
            return []
        return [
            index
            for index, environment in enumerate(self.environments.eval)
            if is_due(
                environment,
                version,
                on_start=self.environments.eval_on_start,
                last_version=self.last_version,
            )
        ]

    def next_due(self, live: int, newest: int) -> int:
        """Return the version to load next: the first in (live, newest] that is due for evaluation, else the newest."""
        return next((version for version in range(live + 1, newest) if self.due(version)), newest)

    def open(self, version: int, dispatcher: Dispatcher) -> bool:
        """Queue every rollout of the evaluation of ``version``; return False if none is due."""
        due = self.due(version)
        if not due:
            return False
        evaluation = OpenEvaluation(version, sum(self.task_counts[env] for env in due))
        for env in due:
            evaluation.groups[env] = []
            for task in range(self.task_counts[env]):
                dispatcher.open_eval(env, task, self.environments.eval[env].samples, evaluation)
        self.evaluated.add(version)
        self.open_versions.add(version)
        return True

    def add(self, group: Group) -> tuple[int, dict[str, float]] | None:
        """Add a finished group; return (version, metrics) if it was the evaluation's last one."""
        evaluation: OpenEvaluation = group.tag
        groups = evaluation.groups[group.env]
        groups.append(group)
        evaluation.num_open -= 1
        if len(groups) == self.task_counts[group.env]:
            environment = self.environments.eval[group.env]
            metrics = eval_metrics(environment.label, environment.samples, groups)
            evaluation.metrics |= metrics
            self.environment_done(evaluation, environment.label, metrics)
        if evaluation.num_open:
            return None
        self.open_versions.remove(evaluation.version)
        all_groups = [group for groups in evaluation.groups.values() for group in groups]
        labels = {environment.label for environment in self.environments.eval}
        if len(evaluation.groups) == len(labels) > 1 and OVERALL not in labels:
            depths = {environment.samples for environment in self.environments.eval}
            evaluation.metrics |= eval_metrics(
                OVERALL, depths.pop() if len(depths) == 1 else None, all_groups
            )
        started = [version for group in all_groups for version in group.versions]
        ended = [rollout.last_version for group in all_groups for rollout in group.results]
        if started:
            evaluation.metrics |= {
                "eval/policy_version/min": min(started),
                "eval/policy_version/max": max(ended),
            }
        evaluation.metrics["time/eval"] = time.monotonic() - evaluation.started
        return evaluation.version, evaluation.metrics

    def environment_done(self, evaluation: OpenEvaluation, label: str, metrics: dict[str, float]) -> None:
        """Hook: called when the last task of one environment of an evaluation is finished."""
