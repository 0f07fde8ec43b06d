"""The interface of algorithms: rewards of a group → an advantage for each trace → training targets for each token.

`Algorithm` is the complete interface. `GroupBaseline` is the common case, in which the rollouts of a group are compared
by one reward each. An instance belongs to one training environment and exists as long as the run, so it may keep state
(see rae), which `state` and `restore` carry through checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.common.block import Block
from primerl_hpc.orchestrator.algorithms.length_penalty import penalize_length, rounding_of
from primerl_hpc.orchestrator.rollout_data import Rollout, Sample, TrainSample


def are_equal(rewards: NDArray[np.float64]) -> bool:
    """True if rewards [G] differ by no more than rounding, which no division by their deviation may amplify."""
    return float(np.ptp(rewards)) <= rounding_of(rewards)


class Algorithm(ABC):
    """Interface of all algorithms."""

    def __init__(self, config: Block) -> None:
        """``config`` is the recipe's block of this type."""
        self.config: Any = config
        self.learned: dict[str, Any] = {}  # JSON-able; saved in checkpoints

    @abstractmethod
    def advantages(self, group: Sequence[Rollout]) -> list[NDArray[np.float64]]:
        """Return for each rollout the advantage of each of its traces; exactly 0 where there is nothing to learn."""

    def train_sample(self, sample: Sample, advantage: float, env_id: int) -> TrainSample:
        """Return which tokens of the sample are trained by which loss.

        By default, the RL loss trains the sampled tokens.
        """
        return TrainSample(sample, advantage, env_id)

    def state(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return dict(self.learned)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.learned = dict(state)


class GroupBaseline(Algorithm):
    """Compare the rollouts of a group with each other; the traces of one rollout share its advantage."""

    def advantages(self, group: Sequence[Rollout]) -> list[NDArray[np.float64]]:
        rewards = penalize_length(self.config.length_penalty, group)
        if are_equal(rewards):
            advantages = np.zeros_like(rewards)
        else:
            advantages = self.compare(rewards, np.asarray([rollout.output_tokens for rollout in group]))
        return [np.full(len(rollout.traces), value) for rollout, value in zip(group, advantages, strict=True)]

    @abstractmethod
    def compare(self, rewards: NDArray[np.float64], output_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the advantages [G] of a group whose ``rewards`` [G] are not all equal.

        ``output_tokens`` [G]: number of sampled tokens.
        """
