"""Group mean as baseline, divided by the group's standard deviation (GRPO, arXiv 2402.03300 §4.1.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.algorithms.base import GroupBaseline

EPS = 1e-8


class GrpoStd(GroupBaseline):
    def compare(self, rewards: NDArray[np.float64], output_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """A_i = (r_i - mean(r)) / (std(r) + ε), with the sample standard deviation (G-1) as in TRL and verl."""
        return (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPS)


ALGORITHM = GrpoStd
