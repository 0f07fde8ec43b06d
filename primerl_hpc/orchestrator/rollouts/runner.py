"""Run rollouts: one asyncio task per rollout, and a queue of their outcomes.

runner.start(start)                        # returns at once
outcome = await runner.outcomes.get()      # Outcome(rollout_id, rollout | None, error)
runner.cancel(rollout_ids)                 # these produce no outcome
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.orchestrator.rollout_data import Outcome, Rollout, RolloutFailed, Split, Start
from primerl_hpc.orchestrator.rollouts.agent_sampling import refuse_other_sampling
from primerl_hpc.orchestrator.rollouts.distillation import Distillation
from primerl_hpc.orchestrator.rollouts.env_client import (
    EnvServerDied,
    EnvServerError,
    external_client,
    external_sampling_config,
    sampling_config,
    train_client,
)
from primerl_hpc.orchestrator.rollouts.environments import EnvHandle
from primerl_hpc.orchestrator.rollouts.images import ImageReader, refuse_images
from primerl_hpc.orchestrator.rollouts.teacher import add_samples
from primerl_hpc.orchestrator.rollouts.trajectories import rollout_of
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.rollout import Sampling

logger = logging.getLogger(__name__)

CLOSE_S = 2.0


class RolloutRunner:
    """Carries out the dispatcher's actions."""

    def __init__(
        self,
        recipe: Recipe,
        envs: dict[Split, list[EnvHandle]],
        *,
        live_version: Callable[[], int],
        router_url: Callable[[], str | None],
        distillation: Distillation | None = None,
    ) -> None:
        """``router_url`` returns the router's current URL, None while it is down.

        Evaluation needs no ``distillation``.
        """
        self.distillation = distillation
        self.recipe, self.envs = recipe, envs
        self.images = ImageReader(recipe.model)
        self.external = recipe.evaluation.external if recipe.evaluation else None
        self.live_version, self.router_url = live_version, router_url
        self.outcomes: asyncio.Queue[Outcome | None] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._client_configs: dict[str, Any] = {}
        self._sampling_configs: dict[tuple[Split, int], tuple[int, Any]] = {}

    def wake(self) -> None:
        """Put None into the queue of outcomes, so that its consumer reacts to another change now."""
        self.outcomes.put_nowait(None)

    @property
    def episodes(self) -> dict[str, int]:
        """Number of episodes at each environment server that has any, by its name."""
        clients = [handle.client for handles in self.envs.values() for handle in handles]
        return {name: number for client in clients for name, number in client.episodes.items() if number}

    def start(self, start: Start) -> None:
        task = asyncio.create_task(self._run(start), name=f"rollout-{start.rollout_id}")
        self._tasks[start.rollout_id] = task
        task.add_done_callback(lambda done: self._ended(start, done))

    def cancel(self, rollout_ids: tuple[int, ...]) -> None:
        for rollout_id in rollout_ids:
            if (task := self._tasks.pop(rollout_id, None)) is not None:
                task.cancel()

    async def close(self) -> None:
        """Cancel the rollouts in flight; environment servers abort them and engines drop their requests.

        Bounded by `CLOSE_S`, because it also runs on SIGTERM; the environment servers' exit ends whatever remains.
        """
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        clients = [handle.client for handles in self.envs.values() for handle in handles]
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.gather(*(client.close() for client in clients))
        except TimeoutError:
            logger.warning("%d rollouts were not cancelled within %.0f s", len(tasks), CLOSE_S)

    def _ended(self, start: Start, task: asyncio.Task[None]) -> None:
        """Produce an outcome also for a task that ended unexpectedly, unless it was cancelled by `cancel`."""
        if self._tasks.pop(start.rollout_id, None) is None:
            return
        if task.cancelled():
            self._failed(start, "Cancelled: by the environment client", is_engine_fault=True)
        elif (error := task.exception()) is not None:
            logger.error("rollout %d failed unexpectedly", start.rollout_id, exc_info=error)
            self._failed(start, f"{type(error).__name__}: {error}")

    async def _run(self, start: Start) -> None:
        started = time.monotonic()
        try:
            rollout = await self._rollout(start)
        except RolloutFailed as error:
            self._failed(start, str(error), is_engine_fault=error.is_engine_fault, is_limit=error.is_limit)
        except EnvServerDied as error:
            self._failed(start, f"EnvServerDied: {error}", is_engine_fault=True)
        except EnvServerError as error:
            self._failed(start, f"EnvServerError: {error}")
        except TimeoutError as error:
            self._failed(start, f"TimeoutError: {error}", is_limit=True)
        except ConfigError as error:
            self.outcomes.put_nowait(
                Outcome(start.rollout_id, *self._labels(start), None, str(error), fatal=error)
            )
        else:
            rollout.last_version = self.live_version()
            rollout.seconds = time.monotonic() - started
            self.outcomes.put_nowait(Outcome(start.rollout_id, *self._labels(start), rollout))

    def _failed(
        self, start: Start, error: str, *, is_engine_fault: bool = False, is_limit: bool = False
    ) -> None:
        labels = self._labels(start)
        self.outcomes.put_nowait(
            Outcome(start.rollout_id, *labels, None, error, is_engine_fault, is_limit=is_limit)
        )

    def _labels(self, start: Start) -> tuple[Split, str, str, int]:
        handle = self.envs[start.split][start.env]
        return start.split, handle.environment.label, handle.tasks[start.task].key, start.version

    async def _rollout(self, start: Start) -> Rollout:
        handle = self.envs[start.split][start.env]
        data = handle.tasks[start.task].data
        algorithm = self.recipe.algorithms[start.env] if start.split is Split.TRAIN else None
        if algorithm is not None and algorithm.samples_from == "teacher":
            return await self._teacher_rollout(handle, start)
        url = self.router_url()
        if url is None:
            raise RolloutFailed("NoRouter", "the router is down", is_engine_fault=True)
        sampling = handle.sampling(self.recipe.rollouts.sampling)
        episode = await handle.client.run(
            data,
            self._client_config(url),
            self.recipe.policy_name,
            self._sampling_config(start, sampling),
            timeout_s=handle.environment.timeout_s,
        )
        if start.split is Split.TRAIN:
            refuse_other_sampling(episode, handle.environment.label, sampling.temperature)
        if algorithm is not None and not algorithm.takes_images:
            refuse_images(episode, handle.environment.label, algorithm.type)
        rollout = rollout_of(episode, temperature=sampling.temperature, need_tokens=self.external is None)
        if start.split is Split.TRAIN:
            await self.images.add_images(rollout, episode)
        if self.distillation is not None:
            await self.distillation.score(
                rollout, episode, algorithm, data, router_url=url, live_version=self.live_version
            )
        return rollout

    async def _teacher_rollout(self, handle: EnvHandle, start: Start) -> Rollout:
        assert self.distillation is not None
        teacher = self.distillation.teacher
        assert teacher is not None  # the recipe is validated
        sampling = handle.sampling(self.recipe.rollouts.sampling)
        episode = await handle.client.run(
            handle.tasks[start.task].data,
            external_client(teacher.next_address()),
            teacher.config.model.name,
            external_sampling_config(sampling, teacher.config.token_limit),
            timeout_s=handle.environment.timeout_s,
        )
        refuse_images(episode, handle.environment.label, self.recipe.algorithms[start.env].type)
        rollout = rollout_of(episode, temperature=1.0, need_tokens=False)
        add_samples(rollout, episode, self.distillation.renderer)
        return rollout

    def _client_config(self, url: str) -> Any:
        if url not in self._client_configs:
            client = external_client(self.external) if self.external else train_client(self.recipe.model, url)
            self._client_configs = {url: client}
        return self._client_configs[url]

    def _sampling_config(self, start: Start, sampling: Sampling) -> Any:
        cached = self._sampling_configs.get((start.split, start.env))
        if cached is None or cached[0] != start.version:
            external = self.external
            config = external_sampling_config(sampling, external.token_limit) if external else None
            cached = (start.version, config or sampling_config(sampling, start.version))
            self._sampling_configs[start.split, start.env] = cached
        return cached[1]
