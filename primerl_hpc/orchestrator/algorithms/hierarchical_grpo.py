"""Group means per agent: inside one episode for agents that play there several times, across the group for the others.

Of a proposer-solver game: the solvers of one episode had the same problem, so they are compared there; proposers are
compared over the episodes of the group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.orchestrator.algorithms.base import EQUAL, Algorithm
from primerl_hpc.orchestrator.trajectories import Rollout


class HierarchicalGrpo(Algorithm):
    """A = r - mean(r) over the traces of the same agent: of the episode (``episode_agents``), or of the group."""

    def advantages(self, group: Sequence[Rollout]) -> list[NDArray[np.float64]]:
        """Raises ConfigError when no agent of the group is one of ``episode_agents``."""
        inside = set(self.config.episode_agents)
        agents = {trace.agent for rollout in group for trace in rollout.traces}
        if not agents & inside:
            raise ConfigError(
                f"algorithm.episode_agents {sorted(inside)} are not among the environment's agents {sorted(agents)}",
                mend="name those that are to be compared inside an episode",
            )
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
