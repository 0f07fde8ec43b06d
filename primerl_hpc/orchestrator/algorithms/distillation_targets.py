"""Distillation: targets from a teacher, or from the policy given a demonstration. Rewards are measured, not trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.algorithms.base import Algorithm
from primerl_hpc.orchestrator.rollout_data import Rollout, Sample, TrainSample


class Opd(Algorithm):
    """On-policy distillation: train every sampled token by the reverse KL to its reference log-probability.

    `orchestrator.rollouts.teacher` has already added the log-probabilities of a frozen teacher to the samples; for
    ``opsd``, `orchestrator.rollouts.self_teacher` those of the live policy, given a demonstration of the task.
    """

    def advantages(self, group: Sequence[Rollout]) -> list[NDArray[np.float64]]:
        return [np.zeros(len(rollout.traces)) for rollout in group]

    def train_sample(self, sample: Sample, advantage: float, env_id: int) -> TrainSample:
        """Set weight 1 for ref_kl and 0 for RL on the sampled tokens. Raises ValueError without ref_logprobs."""
        if sample.ref_logprobs is None:
            raise ValueError("the sample has no teacher log-probabilities")
        return TrainSample(
            sample, advantage, env_id, rl_weight=0.0, ref_kl_weight=1.0, ref_logprobs=sample.ref_logprobs
        )


class SftDistill(Algorithm):
    """Hard distillation: a frozen teacher samples, the policy is trained on its replies by cross-entropy.

    A gate may still select groups by their rewards.
    """

    def advantages(self, group: Sequence[Rollout]) -> list[NDArray[np.float64]]:
        return [np.zeros(len(rollout.traces)) for rollout in group]

    def train_sample(self, sample: Sample, advantage: float, env_id: int) -> TrainSample:
        """Set the ce weight to 1 on the teacher's tokens; the loss mask is empty: the policy sampled none."""
        empty_mask = np.zeros_like(sample.loss_mask)
        return TrainSample(
            replace(sample, loss_mask=empty_mask, logprobs=np.zeros_like(sample.logprobs)),
            advantage,
            env_id,
            rl_weight=0.0,
            ce_weights=sample.loss_mask.astype(np.float32),
        )
