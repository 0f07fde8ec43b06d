"""Group means per agent: inside one episode for agents that play there several times, across the group for the others.

Of a proposer-solver game: the solvers of one episode had the same problem, so they are compared there; proposers are
compared over the episodes of the group. An episode may end before a solver plays. That ``episode_agents`` are agents of the
environment is checked at the start (`orchestrator.setup.check_agents`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.algorithms.base import EQUAL, Algorithm
from primerl_hpc.orchestrator.trajectories import Rollout


class HierarchicalGrpo(Algorithm):
    """A = r - mean(r) over the traces of the same agent: of the episode (``episode_agents``), or of the group."""

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
    if max(peers) - min(peers) < EQUAL:
        return 0.0
    return reward - float(np.mean(peers))


ALGORITHM = HierarchicalGrpo
