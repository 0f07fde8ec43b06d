"""Parts that opd, opsd and sft_distill need in addition to environments: a teacher, and the policy's own renderer.

    distillation = Distillation(run, recipe)        # raises ConfigError if the teacher's key is missing
    await distillation.prepare(handles)             # raises ConfigError or DataError for what would fail later
    await distillation.score(rollout, episode, config, task.data, router_url=url, live_version=lambda: 3)

Does nothing for a recipe without these algorithms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from primerl_hpc.orchestrator.rollout_data import Rollout
from primerl_hpc.orchestrator.rollouts.environments import EnvHandle
from primerl_hpc.orchestrator.rollouts.self_teacher import SelfTeacher, check_demonstrations
from primerl_hpc.orchestrator.rollouts.teacher import TeacherClient
from primerl_hpc.recipe.renderer import load_tokenizer, make_renderer
from primerl_hpc.recipe.schema.algorithm import OPD, OPSD, Algorithm
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.rundir import RunDir

if TYPE_CHECKING:
    from verifiers.v1.episode import Episode


class Distillation:
    """The teacher and self-teacher of a recipe."""

    def __init__(self, run: RunDir, recipe: Recipe) -> None:
        self.run, self.recipe = run, recipe
        self.teacher = None if recipe.teacher is None else TeacherClient(run, recipe.teacher)
        self.self_teacher: SelfTeacher | None = None
        self.renderer: Any = None

    async def prepare(self, handles: Sequence[EnvHandle]) -> None:
        """Load the policy's tokenizer, check the tasks and the teacher. ``handles``: the training environments."""
        kinds = set(self.recipe.algorithm_types)
        if not kinds & {"opd", "opsd", "sft_distill"}:
            return
        for handle, config in zip(handles, self.recipe.algorithms, strict=True):
            if isinstance(config, OPSD):
                check_demonstrations(config, handle.environment.label, handle.tasks)
        tokenizer = await asyncio.to_thread(load_tokenizer, self.recipe.model)
        if kinds & {"opsd", "sft_distill"}:
            self.renderer = make_renderer(self.recipe.model, tokenizer)
        if "opsd" in kinds:
            self.self_teacher = SelfTeacher(self.run, self.recipe, self.renderer)
        if self.teacher is not None:
            await self.teacher.check(kinds, seq_len=self.recipe.seq_len, tokenizer=tokenizer)

    async def score(
        self,
        rollout: Rollout,
        episode: Episode[Any, Any, Any],
        config: Algorithm | None,
        data: dict[str, Any],
        *,
        router_url: str,
        live_version: Callable[[], int],
    ) -> None:
        """Add reference log-probabilities to the samples of an opd or opsd rollout. Raises RolloutFailed."""
        if isinstance(config, OPD):
            assert self.teacher is not None  # the recipe is validated
            await self.teacher.add_logprobs(rollout, seq_len=self.recipe.seq_len)
        elif isinstance(config, OPSD):
            assert self.self_teacher is not None
            text = config.template.format(demonstration=data[config.demo_key])
            await self.self_teacher.add_logprobs(
                rollout, episode, text, url=f"{router_url}/v1", version=live_version()
            )

    async def close(self) -> None:
        for client in (self.teacher, self.self_teacher):
            if client is not None:
                await client.close()
