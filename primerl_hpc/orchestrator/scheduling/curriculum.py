"""Order in which an environment's tasks are drawn: by epochs, or by measured difficulty. Pure and deterministic.

    curriculum = make_curriculum(config, size, [seed, env])
    task = curriculum.next()                     # index in [0, size)
    curriculum.observe(task, mean_reward)        # when a group of the task is finished
    curriculum.record_failure(task)              # or: the group became stale or all its rollouts failed

The same seed and the same observations give the same tasks, and a restored state continues the sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from primerl_hpc.recipe.schema import selection as selection_schema


def make_curriculum(config: selection_schema.Curriculum, size: int, seed: list[int]) -> Curriculum:
    """Return the curriculum of ``size`` tasks; ``seed`` is a sequence of integers, as NumPy accepts it."""
    if isinstance(config, selection_schema.DifficultyPools):
        return DifficultyPoolCurriculum(config, size, seed)
    return Epochs(size, seed, is_shuffled=config.type == "shuffled")


class Curriculum(ABC):
    """Interface of all curricula."""

    @abstractmethod
    def next(self) -> int:
        """Draw the next task."""

    @abstractmethod
    def observe(self, task: int, reward: float) -> None:
        """Record the mean ``reward`` of a finished group of the task."""

    @abstractmethod
    def record_failure(self, task: int) -> None:
        """Record that the task was drawn, and its group became stale or lost all its rollouts."""

    @property
    @abstractmethod
    def epochs(self) -> float:
        """Number of passes over all tasks so far (tasks drawn / number of tasks)."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state, JSON-able."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""

    def metrics(self) -> dict[str, float]:
        """Return metrics by name; none by default."""
        return {}


class Epochs(Curriculum):
    """Draw every task once per epoch; each epoch shuffled differently, or always in the given order."""

    def __init__(self, size: int, seed: list[int], *, is_shuffled: bool = True) -> None:
        self.size, self.seed, self.is_shuffled = size, seed, is_shuffled
        self.drawn = 0
        self._order: tuple[int, list[int]] | None = None

    def next(self) -> int:
        epoch, position = divmod(self.drawn, self.size)
        self.drawn += 1
        if not self.is_shuffled:
            return position
        if self._order is None or self._order[0] != epoch:
            rng = np.random.Generator(np.random.PCG64([*self.seed, epoch]))
            self._order = (epoch, rng.permutation(self.size).tolist())
        return self._order[1][position]

    def observe(self, task: int, reward: float) -> None:
        """Ignored: the order does not depend on rewards."""

    def record_failure(self, task: int) -> None:
        """Ignored: the task is drawn again in the next epoch."""

    @property
    def epochs(self) -> float:
        return self.drawn / self.size

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def restore(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


class DifficultyPoolCurriculum(Curriculum):
    """Draw a task with a probability proportional to the weight of its pool: unseen, hard, normal or easy.

    Unseen tasks are drawn in shuffled order, without repetition; one that was drawn and not yet observed is in no pool.
    A seen task stays in its pool and may be drawn again before its group is finished. A task whose first group failed
    counts as hard. Where every pool is empty or has weight 0, tasks are drawn epoch after epoch.
    """

    NAMES = ("hard", "normal", "easy")

    def __init__(self, config: selection_schema.DifficultyPools, size: int, seed: list[int]) -> None:
        self.config, self.size = config, size
        self._unseen = Epochs(size, seed)
        self._pools: dict[str, list[int]] = {name: [] for name in self.NAMES}
        self._locations: dict[int, tuple[str, int]] = {}  # task → pool and index in it
        self._rng = np.random.Generator(np.random.PCG64([*seed, 0, 1]))
        self._drawn = 0

    def next(self) -> int:
        self._drawn += 1
        weights = {name: weight for name, weight in self._weights().items() if weight > 0}
        if not weights:
            return self._unseen.next()
        shares = np.asarray(list(weights.values())) / sum(weights.values())
        name = list(weights)[int(self._rng.choice(len(weights), p=shares))]
        if name == "unseen":
            return self._unseen.next()
        pool = self._pools[name]
        return pool[int(self._rng.integers(len(pool)))]

    def observe(self, task: int, reward: float) -> None:
        self._remove(task)
        self._put(task, self.pool_of(reward))

    def record_failure(self, task: int) -> None:
        if task not in self._locations:
            self._put(task, "hard")

    def pool_of(self, reward: float) -> str:
        """Return the name of the pool for a mean reward."""
        if reward <= self.config.hard_max:
            return "hard"
        return "normal" if reward <= self.config.normal_max else "easy"

    @property
    def epochs(self) -> float:
        return self._drawn / self.size

    def state(self) -> dict[str, Any]:
        return {
            "drawn": self._drawn,
            "unseen": self._unseen.state(),
            "pools": {name: list(pool) for name, pool in self._pools.items()},
            "rng": self._rng.bit_generator.state,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._drawn = state["drawn"]
        self._unseen.restore(state["unseen"])
        self._pools = {name: list(state["pools"][name]) for name in self.NAMES}
        self._locations = {
            task: (name, index) for name, pool in self._pools.items() for index, task in enumerate(pool)
        }
        self._rng.bit_generator.state = state["rng"]

    def metrics(self) -> dict[str, float]:
        """Return the number of tasks in each pool."""
        return {"unseen": self._num_unseen, **{name: len(pool) for name, pool in self._pools.items()}}

    @property
    def _num_unseen(self) -> int:
        return max(0, self.size - self._unseen.drawn)

    def _weights(self) -> dict[str, float]:
        config = self.config
        return {
            "unseen": config.unseen_weight * self._num_unseen,
            "hard": config.hard_weight * len(self._pools["hard"]),
            "normal": config.normal_weight * len(self._pools["normal"]),
            "easy": config.easy_weight * len(self._pools["easy"]),
        }

    def _put(self, task: int, name: str) -> None:
        self._locations[task] = (name, len(self._pools[name]))
        self._pools[name].append(task)

    def _remove(self, task: int) -> None:
        """Remove the task from its pool in constant time: the pool's last task moves to its position."""
        if (location := self._locations.pop(task, None)) is None:
            return
        name, index = location
        last = self._pools[name].pop()
        if last != task:
            self._pools[name][index] = last
            self._locations[last] = (name, index)
