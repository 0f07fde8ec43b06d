"""grpo, and beside it a small cross-entropy on what the environment said: the policy also learns to foresee it."""

from __future__ import annotations

import numpy as np

from primerl_hpc.orchestrator.algorithms.grpo import Grpo
from primerl_hpc.orchestrator.packing import TrainSample
from primerl_hpc.orchestrator.trajectories import Sample, role_tokens


class Echo(Grpo):
    def train_sample(self, sample: Sample, advantage: float, env_id: int) -> TrainSample:
        """ce weight alpha[role] on the text of messages of that role; a message that several samples share counts once."""
        weights = np.zeros(sample.num_tokens, np.float32)
        for role, alpha in self.config.alpha.items():
            weights[role_tokens(sample, role)] = alpha
        weights[0] = 0  # nothing predicts the first token
        return TrainSample(sample, advantage, env_id, ce_weights=weights if weights.any() else None)


ALGORITHM = Echo
