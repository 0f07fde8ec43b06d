"""Length-weighted mean as baseline, which minimises the gradient's variance (OPO, arXiv 2505.23585)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def opo(rewards: NDArray[np.float64], output_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """A_i = r_i - Σ_j l_j r_j / Σ_j l_j, with l the number of sampled tokens. Shapes [G]."""
    lengths = np.maximum(output_tokens, 1)
    return rewards - (lengths * rewards).sum() / lengths.sum()
