"""A finished group → what is trained of it: advantages, samples, filters, gates.

scorer = Scorer(recipe, vocab_size)
scored = scorer.score(group)
scorer.admits(scored)                   # False: its place in the batch goes to another group
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.algorithms import algorithms_of
from primerl_hpc.orchestrator.dispatcher import Group
from primerl_hpc.orchestrator.filters import make_filter
from primerl_hpc.orchestrator.gates import make_gate
from primerl_hpc.orchestrator.packing import TrainSample
from primerl_hpc.orchestrator.sampler import TaskRef
from primerl_hpc.orchestrator.trajectories import Rollout
from primerl_hpc.recipe.schema import Recipe


@dataclass
class ScoredGroup:
    group_id: int
    task: TaskRef
    rollouts: list[Rollout]
    versions: list[int]  # when each rollout started
    trace_advantages: list[NDArray[np.float64]]  # of each rollout, [its traces]
    samples: list[list[TrainSample]]  # of each rollout, those that are shipped
    num_failed: int
    is_frozen: bool = False  # sampled by a frozen model: never stale

    @property
    def advantages(self) -> NDArray[np.float64]:
        """Of each rollout, the mean over its traces: 0 where what one agent wins the other loses."""
        return np.asarray([each.mean() for each in self.trace_advantages])

    @property
    def oldest_version(self) -> int:
        return min(self.versions)

    def is_stale(self, min_fresh_version: int) -> bool:
        return not self.is_frozen and self.oldest_version < min_fresh_version

    @property
    def has_signal(self) -> bool:
        return any(sample.has_signal for each in self.samples for sample in each)

    @property
    def mean_reward(self) -> float:
        return float(np.mean([rollout.reward for rollout in self.rollouts]))


class Scorer:
    def __init__(self, recipe: Recipe, vocab_size: int = 0) -> None:
        """``vocab_size``: needed where a gibberish filter is configured. Raises ConfigError for a custom part that is not there."""
        environments = recipe.environments.train
        self.algorithms = algorithms_of(recipe)
        self.keeps_zero = recipe.rollouts.zero_advantage == "keep"
        self._filters = [(each, make_filter(each, vocab_size)) for each in recipe.rollouts.filters]
        self._gates = [[(each.type, make_gate(each)) for each in env.gates] for env in environments]
        self._labels = [environment.label for environment in environments]
        self._num_rollouts = 0
        self._detected: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()

    def score(self, group: Group) -> ScoredGroup:
        """Advantages of all rollouts; samples of those that no enforced filter took out."""
        rollouts: list[Rollout] = group.results
        algorithm = self.algorithms[group.env]
        advantages = algorithm.advantages(rollouts)
        return ScoredGroup(
            group.group_id,
            TaskRef(group.env, group.task),
            rollouts,
            group.versions,
            trace_advantages=advantages,
            samples=[
                [] if self._is_filtered(rollout, group.env) else self._train_samples(rollout, each, group.env)
                for rollout, each in zip(rollouts, advantages, strict=True)
            ],
            num_failed=group.num_failed,
            is_frozen=algorithm.config.samples_from == "teacher",
        )

    def admits(self, scored: ScoredGroup) -> bool:
        """Whether every gate of the group's environment lets it through; all of them see it."""
        env = scored.task.env
        verdicts = [(name, gate(scored)) for name, gate in self._gates[env]]
        self._rejected.update(f"gates/{self._labels[env]}/{name}/rejected" for name, ok in verdicts if not ok)
        return all(ok for _, ok in verdicts)

    def take_metrics(self) -> dict[str, float]:
        """Since the last call: groups that gates turned away, and shares of rollouts in which filters found something."""
        metrics: dict[str, float] = {}
        for env, gates in enumerate(self._gates):
            for name, _ in gates:
                key = f"gates/{self._labels[env]}/{name}/rejected"
                metrics[key] = self._rejected[key]
        for config, _ in self._filters:
            key = f"filters/{config.type}/detected"
            metrics[key] = self._detected[key] / max(1, self._num_rollouts)
        self._num_rollouts = 0
        self._detected.clear()
        self._rejected.clear()
        return metrics

    def state(self) -> list[dict[str, Any]]:
        """What each environment's algorithm learnt; JSON-able."""
        return [algorithm.state() for algorithm in self.algorithms]

    def restore(self, state: list[dict[str, Any]]) -> None:
        for algorithm, learnt in zip(self.algorithms, state, strict=True):
            algorithm.restore(learnt)

    def _is_filtered(self, rollout: Rollout, env: int) -> bool:
        self._num_rollouts += 1
        is_ours = self.algorithms[env].config.samples_from == "policy"
        found = [
            config
            for config, detects in self._filters
            if (is_ours or not config.reads_logprobs) and detects(rollout)
        ]
        self._detected.update({f"filters/{config.type}/detected" for config in found})
        return any(config.action == "enforce" for config in found)

    def _train_samples(
        self, rollout: Rollout, advantages: NDArray[np.float64], env: int
    ) -> list[TrainSample]:
        """``advantages[t]`` is of the rollout's trace t."""
        algorithm = self.algorithms[env]
        made = [
            algorithm.train_sample(sample, float(advantages[sample.trace]), env) for sample in rollout.samples
        ]
        if self.keeps_zero:
            return made
        # without an advantage RL would still pull at the policy through its KL term
        return [each if each.advantage else replace(each, rl_weight=0.0) for each in made if each.has_signal]
