"""On-policy distillation: the policy samples, a frozen teacher says how likely each token was, the loss is the reverse KL.

Rewards are measured and not trained on. The teacher's log-probabilities are in the samples when they come here
(`orchestrator.teacher`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.algorithms.base import Algorithm
from primerl_hpc.orchestrator.packing import TrainSample
from primerl_hpc.orchestrator.trajectories import Rollout, Sample


class Opd(Algorithm):
    def advantages(self, group: Sequence[Rollout]) -> list[NDArray[np.float64]]:
        return [np.zeros(len(rollout.traces)) for rollout in group]

    def train_sample(self, sample: Sample, advantage: float, env_id: int) -> TrainSample:
        """Weight 1 of ref_kl on the sampled tokens, none in RL."""
        if sample.ref_logprobs is None:
            raise ValueError("the sample has no log-probabilities of the teacher")
        return TrainSample(
            sample, advantage, env_id, rl_weight=0.0, ref_kl_weight=1.0, ref_logprobs=sample.ref_logprobs
        )


ALGORITHM = Opd
