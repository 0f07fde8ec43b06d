"""Algorithms for environments with several agents: each agent has a baseline of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.algorithms.base import Algorithm, are_equal
from primerl_hpc.orchestrator.rollout_data import AgentTrace, Rollout


class HierarchicalGrpo(Algorithm):
    """A = r - mean(r) over the traces of the same agent, in the episode for ``episode_agents``, else in the group.

    Example: in a proposer-solver game the solvers of one episode had the same problem, so they are compared within it;
    proposers are compared across the episodes of the group. An episode may end before a solver plays. The start-up
    checks that ``episode_agents`` are agents of the environment (`orchestrator.setup.check_agents`).
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


class Rae(Algorithm):
    """Role-conditioned advantage estimation for self-play (SPIRAL, arXiv 2506.24119 §3.3).

    Players of one game cannot be compared with each other, and the group mean of a zero-sum game is not a useful
    baseline, so each agent is compared with a moving average of its own rewards.

    Per trace, in the order of the group's rollouts: A = r - b_agent, then b ← d b + (1 - d) r; b_0 = 0.

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
