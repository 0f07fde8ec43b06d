"""Role-conditioned advantage estimation for self-play (SPIRAL, arXiv 2506.24119 §3.3).

Players of one game cannot be compared with each other, and a zero-sum game's rewards have no group mean worth having;
each agent is compared with its own past instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.algorithms.base import Algorithm
from primerl_hpc.orchestrator.trajectories import Rollout


class Rae(Algorithm):
    """A = r - b_agent, with b_agent as it was before the group; then b ← d b + (1 - d) r, trace by trace, b_0 = 0."""

    def advantages(self, group: Sequence[Rollout]) -> list[NDArray[np.float64]]:
        before: dict[str, float] = dict(self.learnt)
        decay = self.config.decay
        for rollout in group:
            for trace in rollout.traces:
                baseline = self.learnt.get(trace.agent, 0.0)
                self.learnt[trace.agent] = decay * baseline + (1 - decay) * trace.reward
        return [
            np.asarray([trace.reward - before.get(trace.agent, 0.0) for trace in rollout.traces])
            for rollout in group
        ]


ALGORITHM = Rae
