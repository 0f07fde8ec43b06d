"""Which task comes next: environments drawn by ratio, tasks of each in the order of its curriculum.

Deterministic: the same seed, sizes and rewards give the same sequence, and a restored state goes on where it was. Tasks
that were drawn but reached no batch (in flight when the run died) are given back and come first after a resume.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from primerl_hpc.orchestrator.curriculum import make_curriculum
from primerl_hpc.recipe import selection_schema

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskRef:
    """Task ``index`` of train environment ``env``."""

    env: int
    index: int


class TaskSampler:
    def __init__(
        self,
        sizes: list[int],
        ratios: list[float],
        seed: int,
        curricula: Sequence[selection_schema.Curriculum] | None = None,
    ) -> None:
        """``sizes[e]`` tasks in environment e, drawn with probability ``ratios[e] / sum(ratios)``.

        ``curricula``: one per environment; default: all shuffled.
        """
        if not sizes or min(sizes) < 1:
            raise ValueError("every environment needs at least one task")
        self.sizes, self.seed = sizes, seed
        self._cumulative = np.cumsum(np.asarray(ratios, dtype=np.float64) / sum(ratios))
        self._rng = np.random.Generator(np.random.PCG64(seed))
        configs = curricula or [selection_schema.Shuffled()] * len(sizes)
        self.curricula = [
            make_curriculum(config, size, [seed, env])
            for env, (config, size) in enumerate(zip(configs, sizes, strict=True))
        ]
        self._types = [config.type for config in configs]
        self._returned: deque[TaskRef] = deque()

    def next(self) -> TaskRef:
        if self._returned:
            return self._returned.popleft()
        env = min(
            int(np.searchsorted(self._cumulative, self._rng.random(), side="right")), len(self.sizes) - 1
        )
        return TaskRef(env, self.curricula[env].next())

    def observe(self, task: TaskRef, reward: float) -> None:
        """``reward`` is the mean over a finished group of the task."""
        self.curricula[task.env].observe(task.index, reward)

    def missed(self, task: TaskRef) -> None:
        """Its group became stale, or no rollout of it survived."""
        self.curricula[task.env].missed(task.index)

    def give_back(self, tasks: list[TaskRef]) -> None:
        """Tasks that were drawn and will not be run now come first."""
        self._returned.extendleft(reversed(tasks))

    def epochs(self) -> list[float]:
        """How often each environment's tasks were gone through."""
        return [curriculum.epochs for curriculum in self.curricula]

    def state(self, unfinished: list[TaskRef]) -> dict[str, Any]:
        """JSON-able; ``unfinished`` are tasks that were drawn and will be lost if the process dies now."""
        returned = [*unfinished, *self._returned]
        return {
            "sizes": self.sizes,
            "curricula": [curriculum.state() for curriculum in self.curricula],
            "curriculum_types": self._types,
            "rng": self._rng.bit_generator.state,
            "returned": [[task.env, task.index] for task in returned],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Raises ValueError when the environments have other numbers of tasks than when the state was saved.

        A curriculum that is of another type now, as a fork's may be, begins anew.
        """
        if state["sizes"] != self.sizes:
            raise ValueError(f"environments had {state['sizes']} tasks and have {self.sizes} now")
        # earlier versions did not write the types
        types = state.get("curriculum_types") or [_type_of(saved) for saved in state["curricula"]]
        for env, (curriculum, saved) in enumerate(zip(self.curricula, state["curricula"], strict=True)):
            if self._types[env] in types[env]:
                curriculum.restore(saved)
            else:
                logger.warning(
                    "the curriculum of training environment %d was %s and is %s: it begins anew",
                    env,
                    types[env],
                    self._types[env],
                )
        self._rng.bit_generator.state = state["rng"]
        self._returned = deque(TaskRef(env, index) for env, index in state["returned"])


def _type_of(saved: dict[str, Any]) -> str:
    """Of the curriculum with this state; those that go by epochs cannot be told apart."""
    return "difficulty_pools" if "unseen" in saved else "shuffled or sequential"
