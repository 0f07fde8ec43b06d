"""Role-conditioned advantage estimation for self-play (SPIRAL, arXiv 2506.24119 §3.3).

Players of one game cannot be compared with each other, and the group mean of a zero-sum game is not a useful baseline,
so each agent is compared with a moving average of its own rewards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.algorithms.base import Algorithm
from primerl_hpc.orchestrator.types import AgentTrace, Rollout


class Rae(Algorithm):
    """Per trace, in the order of the group's rollouts: A = r - b_agent, then b ← d b + (1 - d) r; b_0 = 0.

    The baseline of a trace is the value before its own update, as in SPIRAL's reference code (``prepare_trajectories``
    of train_spiral.py): a trace is never compared with itself, and the later traces of a group are compared with the
    earlier ones.
    """

    def advantages(self, group: Sequence[Rollout]) -> list[NDArray[np.float64]]:
        return [np.asarray([self._advantage(trace) for trace in rollout.traces]) for rollout in group]

    def _advantage(self, trace: AgentTrace) -> float:
        baseline: float = self.learned.get(trace.agent, 0.0)
        decay = self.config.decay
        self.learned[trace.agent] = decay * baseline + (1 - decay) * trace.reward
        return trace.reward - baseline


ALGORITHM = Rae
