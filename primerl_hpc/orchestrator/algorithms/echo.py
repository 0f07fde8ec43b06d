"""grpo plus a small cross-entropy loss on environment messages, so that the policy also learns to predict them."""

from __future__ import annotations

import numpy as np

from primerl_hpc.orchestrator.algorithms.grpo import Grpo
from primerl_hpc.orchestrator.rollouts.trajectories import role_tokens
from primerl_hpc.orchestrator.types import Sample, TrainSample


class Echo(Grpo):
    """Group mean as baseline for the sampled tokens, cross-entropy on environment messages."""

    def train_sample(self, sample: Sample, advantage: float, env_id: int) -> TrainSample:
        """Add the cross-entropy weight alpha[role] to the text of messages of that role.

        A message that several samples share counts once.
        """
        weights = np.zeros(sample.num_tokens, np.float32)
        for role, alpha in self.config.alpha.items():
            weights[role_tokens(sample, role)] = alpha
        weights[0] = 0  # nothing predicts the first token
        return TrainSample(sample, advantage, env_id, ce_weights=weights if weights.any() else None)


ALGORITHM = Echo
