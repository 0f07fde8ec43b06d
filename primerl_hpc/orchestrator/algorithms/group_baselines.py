"""Algorithms that compare the rollouts of a group by one reward each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.algorithms.base import GroupBaseline
from primerl_hpc.orchestrator.rollout_data import Sample, TrainSample
from primerl_hpc.orchestrator.rollouts.trajectories import role_tokens

EPS = 1e-8
"""Added to the standard deviation by `GrpoStd`."""


class Grpo(GroupBaseline):
    """Group mean as baseline, without division by the standard deviation (Dr. GRPO, arXiv 2503.20783)."""

    def compare(self, rewards: NDArray[np.float64], output_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """A_i = r_i - mean(r)."""
        return rewards - rewards.mean()


class GrpoStd(GroupBaseline):
    """Group mean as baseline, divided by the group's standard deviation (GRPO, arXiv 2402.03300 §4.1.2)."""

    def compare(self, rewards: NDArray[np.float64], output_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """A_i = (r_i - mean(r)) / (std(r) + ε), with the sample standard deviation (G-1) as in TRL and verl."""
        return (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPS)


class Rloo(GroupBaseline):
    """Mean of the *other* rollouts as baseline (RLOO, arXiv 2402.14740)."""

    def compare(self, rewards: NDArray[np.float64], output_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """A_i = r_i - 1/(G-1) Σ_{j≠i} r_j = G/(G-1) (r_i - mean(r))."""
        size = len(rewards)
        return size / (size - 1) * (rewards - rewards.mean())


class Opo(GroupBaseline):
    """Length-weighted mean as baseline, which minimizes the variance of the gradient (OPO, arXiv 2505.23585)."""

    def compare(self, rewards: NDArray[np.float64], output_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """A_i = r_i - Σ_j l_j r_j / Σ_j l_j, with l the number of sampled tokens."""
        lengths = np.maximum(output_tokens, 1)
        return rewards - (lengths * rewards).sum() / lengths.sum()


class MaxRl(GroupBaseline):
    """Advantage relative to the group's mean, so that rare successes weigh more (MaxRL: maximum-likelihood RL)."""

    def compare(self, rewards: NDArray[np.float64], output_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """A_i = (r_i - mean(r)) / mean(r); 0 where mean(r) ≤ 0."""
        mean = rewards.mean()
        return (rewards - mean) / mean if mean > 0 else np.zeros_like(rewards)


class Echo(Grpo):
    """grpo plus a small cross-entropy loss on environment messages, so that the policy also learns to predict them."""

    def train_sample(self, sample: Sample, advantage: float, env_id: int) -> TrainSample:
        """Add the cross-entropy weight alpha[role] to the text of messages of that role.

        A message that several samples share counts once.
        """
        weights = np.zeros(sample.num_tokens, np.float32)
        for role, alpha in self.config.alpha.items():
            weights[role_tokens(sample, role)] = alpha
        weights[0] = 0  # nothing predicts the first token
        return TrainSample(sample, advantage, env_id, ce_weights=weights if weights.any() else None)
