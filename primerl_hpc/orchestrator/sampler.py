"""Which task comes next: environments drawn by ratio, tasks of each in a shuffled order that covers every epoch.

Deterministic: the same seed and sizes give the same sequence, and a restored state goes on where it was. Tasks that
were drawn but reached no batch (in flight when the run died) are given back and come first after a resume.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TaskRef:
    """Task ``index`` of train environment ``env``."""

    env: int
    index: int


class TaskSampler:
    def __init__(self, sizes: list[int], ratios: list[float], seed: int) -> None:
        """``sizes[e]`` tasks in environment e, drawn with probability ``ratios[e] / sum(ratios)``."""
        if not sizes or min(sizes) < 1:
            raise ValueError("every environment needs at least one task")
        self.sizes, self.seed = sizes, seed
        self._cumulative = np.cumsum(np.asarray(ratios, dtype=np.float64) / sum(ratios))
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._drawn = [0] * len(sizes)  # tasks taken from each environment so far, over all epochs
        self._orders: dict[int, tuple[int, list[int]]] = {}
        self._returned: deque[TaskRef] = deque()

    def next(self) -> TaskRef:
        if self._returned:
            return self._returned.popleft()
        env = min(
            int(np.searchsorted(self._cumulative, self._rng.random(), side="right")), len(self.sizes) - 1
        )
        epoch, position = divmod(self._drawn[env], self.sizes[env])
        self._drawn[env] += 1
        return TaskRef(env, self._order(env, epoch)[position])

    def epochs(self) -> list[float]:
        """How often each environment's tasks were gone through."""
        return [drawn / size for drawn, size in zip(self._drawn, self.sizes, strict=True)]

    def state(self, unfinished: list[TaskRef]) -> dict[str, Any]:
        """JSON-able; ``unfinished`` are tasks that were drawn and will be lost if the process dies now."""
        returned = [*unfinished, *self._returned]
        return {
            "sizes": self.sizes,
            "drawn": list(self._drawn),
            "rng": self._rng.bit_generator.state,
            "returned": [[task.env, task.index] for task in returned],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Raises ValueError when the environments have other numbers of tasks than when the state was saved."""
        if state["sizes"] != self.sizes:
            raise ValueError(f"environments had {state['sizes']} tasks and have {self.sizes} now")
        self._drawn = list(state["drawn"])
        self._rng.bit_generator.state = state["rng"]
        self._returned = deque(TaskRef(env, index) for env, index in state["returned"])

    def _order(self, env: int, epoch: int) -> list[int]:
        known = self._orders.get(env)
        if known is None or known[0] != epoch:
            order = np.random.Generator(np.random.PCG64([self.seed, env, epoch])).permutation(self.sizes[env])
            known = self._orders[env] = (epoch, order.tolist())
        return known[1]
