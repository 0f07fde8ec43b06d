"""Mean of the *other* rollouts as baseline (RLOO, arXiv 2402.14740)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.algorithms.base import GroupBaseline


class Rloo(GroupBaseline):
    def compare(self, rewards: NDArray[np.float64], output_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """A_i = r_i - 1/(G-1) Σ_{j≠i} r_j = G/(G-1) (r_i - mean(r))."""
        size = len(rewards)
        return size / (size - 1) * (rewards - rewards.mean())


ALGORITHM = Rloo
