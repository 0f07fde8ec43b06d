"""In which order an environment's tasks come: by epochs, or by how difficult they proved to be. Pure; deterministic.

    curriculum = make_curriculum(config, size, [seed, env])
    task = curriculum.next()                     # index in [0, size)
    curriculum.observe(task, mean_reward)        # of the task's group, whenever one is done
    curriculum.missed(task)                      # or: nothing came of its group

The same seed and the same observations give the same tasks, and a restored state goes on where it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from primerl_hpc.recipe import selection_schema


def make_curriculum(config: selection_schema.Curriculum, size: int, seed: list[int]) -> Curriculum:
    """``size`` tasks; ``seed`` is a sequence of numbers, as NumPy takes it."""
    if isinstance(config, selection_schema.DifficultyPools):
        return DifficultyPools(config, size, seed)
    return Epochs(size, seed, is_shuffled=config.type == "shuffled")


class Curriculum(ABC):
    @abstractmethod
    def next(self) -> int:
        """The task to try now."""

    @abstractmethod
    def observe(self, task: int, reward: float) -> None:
        """``reward`` is the mean over a finished group of the task."""

    @abstractmethod
    def missed(self, task: int) -> None:
        """The task was drawn, and its group became stale or lost all its rollouts."""

    @property
    @abstractmethod
    def epochs(self) -> float:
        """Tasks drawn so far, in passes over all of them."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """JSON-able."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""

    def metrics(self) -> dict[str, float]:
        return {}


class Epochs(Curriculum):
    """Every task once, then every task again; each epoch shuffled anew, or always in the given order."""

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
        """Order does not depend on rewards."""

    def missed(self, task: int) -> None:
        """It comes again in the next epoch."""

    @property
    def epochs(self) -> float:
        return self.drawn / self.size

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def restore(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


class DifficultyPools(Curriculum):
    """A task is drawn with a probability proportional to its pool's weight: unseen, hard, normal or easy.

    Unseen tasks come in a shuffled order, without repetition; one that was drawn and not yet observed is in no pool. A seen
    one stays in its pool, and may be drawn again before its group is done. One whose first group came to nothing counts
    as hard.
    Where every pool is empty or without weight, tasks come epoch after epoch.
    """

    NAMES = ("hard", "normal", "easy")

    def __init__(self, config: selection_schema.DifficultyPools, size: int, seed: list[int]) -> None:
        self.config, self.size = config, size
        self._unseen = Epochs(size, seed)
        self._pools: dict[str, list[int]] = {name: [] for name in self.NAMES}
        self._places: dict[int, tuple[str, int]] = {}  # task → pool and index there
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

    def missed(self, task: int) -> None:
        if task not in self._places:
            self._put(task, "hard")

    def pool_of(self, reward: float) -> str:
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
        self._places = {
            task: (name, index) for name, pool in self._pools.items() for index, task in enumerate(pool)
        }
        self._rng.bit_generator.state = state["rng"]

    def metrics(self) -> dict[str, float]:
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
        self._places[task] = (name, len(self._pools[name]))
        self._pools[name].append(task)

    def _remove(self, task: int) -> None:
        """In constant time: the pool's last task takes the place."""
        if (place := self._places.pop(task, None)) is None:
            return
        name, index = place
        last = self._pools[name].pop()
        if last != task:
            self._pools[name][index] = last
            self._places[last] = (name, index)
