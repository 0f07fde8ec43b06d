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

from primerl_hpc.orchestrator.rollout_data import TaskRef
from primerl_hpc.orchestrator.scheduling.curriculum import make_curriculum
from primerl_hpc.recipe.schema import selection as selection_schema

logger = logging.getLogger(__name__)


class TaskSampler:
    def __init__(
        self,
        sizes: list[int],
        ratios: list[float],
        seed: int,
        curricula: Sequence[selection_schema.Curriculum] | None = None,
        fingerprints: Sequence[str] | None = None,
        *,
        accepts_changes: bool = False,
    ) -> None:
        """``sizes[e]`` tasks in environment e, drawn with probability ``ratios[e] / sum(ratios)``.

        ``curricula``: one per environment; default: all shuffled. ``fingerprints``: one per environment, which
        depends on its tasks and their order; None: only their numbers are compared at a resume. ``accepts_changes``:
        the curriculum of an environment with other tasks starts over at a resume; False: `restore` raises.
        """
        if not sizes or min(sizes) < 1:
            raise ValueError("every environment needs at least one task")
        self.sizes, self.seed = sizes, seed
        self.fingerprints, self.accepts_changes = list(fingerprints or [""] * len(sizes)), accepts_changes
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
            "fingerprints": self.fingerprints,
            "curricula": [curriculum.state() for curriculum in self.curricula],
            "curriculum_types": self._types,
            "rng": self._rng.bit_generator.state,
            "returned": [[task.env, task.index] for task in returned],
        }

    def restore(self, state: dict[str, Any]) -> frozenset[int]:
        """Continue from what `state` returned; return the environments whose tasks changed.

        A curriculum whose type has changed (possible in a fork) starts over. Raises ValueError for another number of
        environments, and for other tasks unless changes are accepted.
        """
        changed = self._changed_environments(state)
        if changed and not self.accepts_changes:
            raise ValueError(self._describe_change(state, changed[0]))
        # earlier versions did not write the types
        types = state.get("curriculum_types") or [_type_of(saved) for saved in state["curricula"]]
        for env, (curriculum, saved) in enumerate(zip(self.curricula, state["curricula"], strict=True)):
            if env in changed:
                logger.warning("%s: starting its curriculum over", self._describe_change(state, env))
            elif self._types[env] in types[env]:
                curriculum.restore(saved)
            else:
                logger.warning(
                    "curriculum of training environment %d changed from %s to %s: starting it over",
                    env,
                    types[env],
                    self._types[env],
                )
        self._rng.bit_generator.state = state["rng"]
        self._returned = deque(TaskRef(env, index) for env, index in state["returned"] if env not in changed)
        return frozenset(changed)

    def _changed_environments(self, state: dict[str, Any]) -> list[int]:
        if len(state["sizes"]) != len(self.sizes):
            raise ValueError(
                f"there were {len(state['sizes'])} training environments at the checkpoint, now {len(self.sizes)}"
            )
        # earlier versions did not write fingerprints
        before = state.get("fingerprints") or [""] * len(self.sizes)
        return [
            env
            for env, (old, new) in enumerate(zip(before, self.fingerprints, strict=True))
            if state["sizes"][env] != self.sizes[env] or (old and new and old != new)
        ]

    def _describe_change(self, state: dict[str, Any], env: int) -> str:
        before, now = state["sizes"][env], self.sizes[env]
        if before != now:
            return f"training environment {env} had {before} tasks at the checkpoint and has {now} now"
        return f"training environment {env} has {now} tasks as at the checkpoint, but other ones or in another order"


def _type_of(saved: dict[str, Any]) -> str:
    """Return the type of the curriculum with this state; those that go by epochs cannot be distinguished."""
    return "difficulty_pools" if "unseen" in saved else "shuffled or sequential"
