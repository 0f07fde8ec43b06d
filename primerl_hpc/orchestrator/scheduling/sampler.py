"""Draw the next task: the environment by ratio, the task in the order of the environment's curriculum.

Deterministic: the same seed, sizes and rewards give the same sequence, and a restored state continues it. Tasks that
were drawn but reached no batch (in flight when the run stopped) are requeued and come first after a resume.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from primerl_hpc.orchestrator.scheduling.curriculum import make_curriculum
from primerl_hpc.orchestrator.types import TaskRef
from primerl_hpc.recipe.schema import selection as selection_schema

logger = logging.getLogger(__name__)


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
        """Return the next task: requeued tasks first, then drawn ones."""
        if self._returned:
            return self._returned.popleft()
        env = min(
            int(np.searchsorted(self._cumulative, self._rng.random(), side="right")), len(self.sizes) - 1
        )
        return TaskRef(env, self.curricula[env].next())

    def observe(self, task: TaskRef, reward: float) -> None:
        """Record the mean ``reward`` of a finished group of the task."""
        self.curricula[task.env].observe(task.index, reward)

    def record_failure(self, task: TaskRef) -> None:
        """Record that the task's group became stale or that all its rollouts failed."""
        self.curricula[task.env].record_failure(task.index)

    def requeue(self, tasks: list[TaskRef]) -> None:
        """Put tasks that were drawn and will not run now at the front."""
        self._returned.extendleft(reversed(tasks))

    def epochs(self) -> list[float]:
        """Return the number of passes over each environment's tasks so far."""
        return [curriculum.epochs for curriculum in self.curricula]

    def state(self, unfinished: list[TaskRef]) -> dict[str, Any]:
        """Return the state, JSON-able. ``unfinished``: tasks drawn whose groups are lost if the process ends now."""
        returned = [*unfinished, *self._returned]
        return {
            "sizes": self.sizes,
            "curricula": [curriculum.state() for curriculum in self.curricula],
            "curriculum_types": self._types,
            "rng": self._rng.bit_generator.state,
            "returned": [[task.env, task.index] for task in returned],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned.

        A curriculum whose type has changed (possible in a fork) starts over. Raises ValueError if the numbers of tasks
        differ from those in the state.
        """
        if state["sizes"] != self.sizes:
            raise ValueError(
                f"the environments had {state['sizes']} tasks at the checkpoint and have {self.sizes} now"
            )
        # earlier versions did not write the types
        types = state.get("curriculum_types") or [_type_of(saved) for saved in state["curricula"]]
        for env, (curriculum, saved) in enumerate(zip(self.curricula, state["curricula"], strict=True)):
            if self._types[env] in types[env]:
                curriculum.restore(saved)
            else:
                logger.warning(
                    "curriculum of training environment %d changed from %s to %s: starting it over",
                    env,
                    types[env],
                    self._types[env],
                )
        self._rng.bit_generator.state = state["rng"]
        self._returned = deque(TaskRef(env, index) for env, index in state["returned"])


def _type_of(saved: dict[str, Any]) -> str:
    """Return the type of the curriculum with this state; those that go by epochs cannot be distinguished."""
    return "difficulty_pools" if "unseen" in saved else "shuffled or sequential"
