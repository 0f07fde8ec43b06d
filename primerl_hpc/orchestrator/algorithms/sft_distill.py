"""Hard distillation: a frozen teacher samples, the policy is trained on its replies by cross-entropy.

Rewards are measured but not trained on; a gate may still select groups by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.algorithms.base import Algorithm
from primerl_hpc.orchestrator.types import Rollout, Sample, TrainSample


class SftDistill(Algorithm):
    """Train the teacher's tokens by cross-entropy."""

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


ALGORITHM = SftDistill
