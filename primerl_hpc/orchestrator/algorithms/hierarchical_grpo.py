"""Group means per agent: within one episode for agents that play several times in it, across the group for the others.

Example: in a proposer-solver game the solvers of one episode had the same problem, so they are compared within it;
proposers are compared across the episodes of the group. An episode may end before a solver plays. The start-up checks
that ``episode_agents`` are agents of the environment (`orchestrator.setup.check_agents`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.algorithms.base import Algorithm, are_equal
from primerl_hpc.orchestrator.types import Rollout


class HierarchicalGrpo(Algorithm):
    """A = r - mean(r) over the traces of the same agent.

    The mean is over the episode for ``episode_agents``, over the group for all others.
    """

    def advantages(self, group: Sequence[Rollout]) -> list[NDArray[np.float64]]:
        inside = set(self.config.episode_agents)
        peers: dict[tuple[str, int], list[float]] = {}
        for index, rollout in enumerate(group):
            for trace in rollout.traces:
                peers.setdefault(self._key(trace.agent, index, inside), []).append(trace.reward)
        return [
            np.asarray(
                [
                    _against(trace.reward, peers[self._key(trace.agent, index, inside)])
                    for trace in rollout.traces
                ]
            )
            for index, rollout in enumerate(group)
        ]

    def _key(self, agent: str, rollout: int, inside: set[str]) -> tuple[str, int]:
        return (agent, rollout if agent in inside else -1)


def _against(reward: float, peers: list[float]) -> float:
    if are_equal(np.asarray(peers)):
        return 0.0
    return reward - float(np.mean(peers))


ALGORITHM = HierarchicalGrpo
