"""Hard distillation: a frozen teacher samples, the student is trained on its replies by cross-entropy.

Rewards are measured and not trained on; a gate may still choose groups by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.algorithms.base import Algorithm
from primerl_hpc.orchestrator.packing import TrainSample
from primerl_hpc.orchestrator.trajectories import Rollout, Sample


class SftDistill(Algorithm):
    def advantages(self, group: Sequence[Rollout]) -> list[NDArray[np.float64]]:
        return [np.zeros(len(rollout.traces)) for rollout in group]

    def train_sample(self, sample: Sample, advantage: float, env_id: int) -> TrainSample:
        """Weight 1 of ce on the teacher's tokens. The loss mask is empty, for the policy sampled none of them."""
        nothing = np.zeros_like(sample.loss_mask)
        return TrainSample(
            replace(sample, loss_mask=nothing, logprobs=np.zeros_like(sample.logprobs)),
            advantage,
            env_id,
            rl_weight=0.0,
            ce_weights=sample.loss_mask.astype(np.float32),
        )


ALGORITHM = SftDistill
