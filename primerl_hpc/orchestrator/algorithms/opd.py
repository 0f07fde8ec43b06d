"""On-policy distillation: the policy samples, a frozen teacher scores each token, the loss is the reverse KL.

Rewards are measured but not trained on. `orchestrator.rollouts.teacher` has already added the teacher's
log-probabilities to the samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.algorithms.base import Algorithm
from primerl_hpc.orchestrator.types import Rollout, Sample, TrainSample


class Opd(Algorithm):
    """Train every sampled token by the reverse KL to its reference log-probability."""

    def advantages(self, group: Sequence[Rollout]) -> list[NDArray[np.float64]]:
        return [np.zeros(len(rollout.traces)) for rollout in group]

    def train_sample(self, sample: Sample, advantage: float, env_id: int) -> TrainSample:
        """Set weight 1 for ref_kl and 0 for RL on the sampled tokens. Raises ValueError without ref_logprobs."""
        if sample.ref_logprobs is None:
            raise ValueError("the sample has no teacher log-probabilities")
        return TrainSample(
            sample, advantage, env_id, rl_weight=0.0, ref_kl_weight=1.0, ref_logprobs=sample.ref_logprobs
        )


ALGORITHM = Opd
