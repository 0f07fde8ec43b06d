"""Score finished groups: advantages, training samples, filters, gates.

scorer = Scorer(recipe, vocab_size)
scored = scorer.score(group)
scorer.admits(scored)                   # False: another group takes its place in the batch
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.algorithms import algorithms_of
from primerl_hpc.orchestrator.rollout_data import Group, Rollout, ScoredGroup, TaskRef, TrainSample
from primerl_hpc.orchestrator.scoring.filters import make_filter
from primerl_hpc.orchestrator.scoring.gates import make_gate
from primerl_hpc.recipe.schema.recipe import Recipe


class Scorer:
    """The algorithms, filters and gates of a recipe."""

    def __init__(self, recipe: Recipe, vocab_size: int = 0) -> None:
        """``vocab_size`` is needed only by a gibberish filter.

        Raises ConfigError for a custom algorithm or gate that cannot be imported.
        """
        environments = recipe.environments.train
        self.algorithms = algorithms_of(recipe)
        self.keeps_zero = recipe.rollouts.zero_advantage == "keep"
        self._filters = [(config, make_filter(config, vocab_size)) for config in recipe.rollouts.filters]
        self._gates = [
            [(gate.type, make_gate(gate)) for gate in environment.gates] for environment in environments
        ]
        self._labels = [environment.label for environment in environments]
        self._num_rollouts = 0
        self._detected: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()

    def score(self, group: Group) -> ScoredGroup:
        """Compute the advantages of all rollouts and the samples of those that no enforced filter detected."""
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
                []
                if self._is_filtered(rollout, group.env)
                else self._train_samples(rollout, trace_advantages, group.env)
                for rollout, trace_advantages in zip(rollouts, advantages, strict=True)
            ],
            num_failed=group.num_failed,
            is_frozen=algorithm.config.samples_from == "teacher",
        )

    def admits(self, scored: ScoredGroup) -> bool:
        """True if every gate of the group's environment admits it; each gate counts its rejections."""
        env = scored.task.env
        results = [(name, gate(scored)) for name, gate in self._gates[env]]
        self._rejected.update(
            f"gates/{self._labels[env]}/{name}/rejected" for name, is_admitted in results if not is_admitted
        )
        return all(is_admitted for _, is_admitted in results)

    def take_metrics(self) -> dict[str, float]:
        """Return rejected groups by gate and detected shares of rollouts by filter, since the last call."""
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
        """Return the state of each environment's algorithm, JSON-able."""
        return [algorithm.state() for algorithm in self.algorithms]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Continue from what `state` returned."""
        for algorithm, saved in zip(self.algorithms, state, strict=True):
            algorithm.restore(saved)

    def _is_filtered(self, rollout: Rollout, env: int) -> bool:
        self._num_rollouts += 1
        is_sampled_by_policy = self.algorithms[env].config.samples_from == "policy"
        detected = [
            config
            for config, detects in self._filters
            if (is_sampled_by_policy or not config.reads_logprobs) and detects(rollout)
        ]
        self._detected.update({f"filters/{config.type}/detected" for config in detected})
        return any(config.action == "enforce" for config in detected)

    def _train_samples(
        self, rollout: Rollout, advantages: NDArray[np.float64], env: int
    ) -> list[TrainSample]:
        """Return the rollout's training samples; ``advantages[t]`` belongs to its trace t."""
        algorithm = self.algorithms[env]
        samples = [
            algorithm.train_sample(sample, float(advantages[sample.trace]), env) for sample in rollout.samples
        ]
        if self.keeps_zero:
            return samples
        # without an advantage, the RL loss would still have a gradient through its KL term
        return [
            sample if sample.advantage else replace(sample, rl_weight=0.0)
            for sample in samples
            if sample.has_signal
        ]
