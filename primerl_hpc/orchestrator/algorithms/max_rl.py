"""Advantage relative to the group's mean, so that rare successes weigh more (MaxRL: maximum-likelihood RL)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.algorithms.base import GroupBaseline


class MaxRl(GroupBaseline):
    def compare(self, rewards: NDArray[np.float64], output_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """A_i = (r_i - mean(r)) / mean(r); 0 where mean(r) ≤ 0."""
        mean = rewards.mean()
        return (rewards - mean) / mean if mean > 0 else np.zeros_like(rewards)


ALGORITHM = MaxRl
