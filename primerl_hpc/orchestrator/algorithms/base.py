"""What an algorithm is: rewards of a group → an advantage for each trace → what each token is trained on.

`Algorithm` is the whole contract; `GroupBaseline` is the common case, in which rollouts of a group are compared by one
reward each. An instance belongs to one training environment and lives as long as the run, so it may learn (see rae);
what it learns goes through `state` and `restore` into checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.common.block import Block
from primerl_hpc.orchestrator.algorithms.length_penalty import penalize_length
from primerl_hpc.orchestrator.packing import TrainSample
from primerl_hpc.orchestrator.trajectories import Rollout, Sample

# Rewards closer than this are equal: rounding must not become a signal when divided by a tiny standard deviation.
EQUAL = 1e-9


class Algorithm(ABC):
    def __init__(self, config: Block) -> None:
        """``config`` is the recipe's block of this type."""
        self.config: Any = config
        self.learnt: dict[str, Any] = {}  # JSON-able; in checkpoints

    @abstractmethod
    def advantages(self, group: Sequence[Rollout]) -> list[NDArray[np.float64]]:
        """Per rollout, the advantage of each of its traces; exact zeros where there is nothing to learn."""

    def train_sample(self, sample: Sample, advantage: float, env_id: int) -> TrainSample:
        """Which tokens of the sample are trained, by which loss. Here: the sampled ones, by the RL loss."""
        return TrainSample(sample, advantage, env_id)

    def state(self) -> dict[str, Any]:
        """What was learnt so far."""
        return dict(self.learnt)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.learnt = dict(state)


class GroupBaseline(Algorithm):
    """Rollouts of a group against each other; the traces of one rollout share its advantage."""

    def advantages(self, group: Sequence[Rollout]) -> list[NDArray[np.float64]]:
        rewards = penalize_length(self.config.length_penalty, group)
        if np.ptp(rewards) < EQUAL:
            found = np.zeros_like(rewards)
        else:
            found = self.compare(rewards, np.asarray([rollout.output_tokens for rollout in group]))
        return [np.full(len(rollout.traces), each) for rollout, each in zip(group, found, strict=True)]

    @abstractmethod
    def compare(self, rewards: NDArray[np.float64], output_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Advantages [G] of a group whose ``rewards`` [G] are not all equal; ``output_tokens`` [G] were sampled."""
