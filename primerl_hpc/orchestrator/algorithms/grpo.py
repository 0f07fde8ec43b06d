"""Group mean as baseline, without division by the standard deviation (Dr. GRPO, arXiv 2503.20783)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.algorithms.base import GroupBaseline


class Grpo(GroupBaseline):
    def compare(self, rewards: NDArray[np.float64], output_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """A_i = r_i - mean(r)."""
        return rewards - rewards.mean()


ALGORITHM = Grpo
