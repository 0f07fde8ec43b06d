"""Length-weighted mean as baseline, which minimizes the variance of the gradient (OPO, arXiv 2505.23585)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.algorithms.base import GroupBaseline


class Opo(GroupBaseline):
    def compare(self, rewards: NDArray[np.float64], output_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """A_i = r_i - Σ_j l_j r_j / Σ_j l_j, with l the number of sampled tokens."""
        lengths = np.maximum(output_tokens, 1)
        return rewards - (lengths * rewards).sum() / lengths.sum()


ALGORITHM = Opo
