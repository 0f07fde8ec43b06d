"""Carries the dispatcher's actions out: one asyncio task per rollout, and a queue of what became of them.

runner.start(start)                        # returns at once
outcome = await runner.outcomes.get()      # Outcome(rollout_id, rollout | None, error)
runner.cancel(rollout_ids)                 # their outcomes never come
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from primerl_hpc.common.errors import ConfigError, PrimerlError
from primerl_hpc.envs.tasks import EnvironmentTask
from primerl_hpc.orchestrator.dispatcher import Split, Start
from primerl_hpc.orchestrator.distillation import Distillation
from primerl_hpc.orchestrator.env_client import (
    EnvServerClient,
    EnvServerDied,
    EnvServerError,
    external_client,
    external_sampling_config,
    sampling_config,
    train_client,
)
from primerl_hpc.orchestrator.env_pool import EnvServerPool
from primerl_hpc.orchestrator.images import ImageReader, refuse_images
from primerl_hpc.orchestrator.teacher import add_samples
from primerl_hpc.orchestrator.trajectories import Rollout, RolloutFailed, rollout_of
from primerl_hpc.recipe.rollout_schema import Environment, EvalEnvironment, Sampling
from primerl_hpc.recipe.schema import Recipe

logger = logging.getLogger(__name__)

CLOSE_S = 2.0


@dataclass
class EnvHandle:
    """One environment of the recipe: its server and its tasks."""

    environment: Environment
    client: EnvServerClient | EnvServerPool
    tasks: list[EnvironmentTask] = field(default_factory=list)

    def sampling(self, default: Sampling) -> Sampling:
        own = self.environment.sampling if isinstance(self.environment, EvalEnvironment) else None
        return own or default


@dataclass(frozen=True)
class Outcome:
    """How one rollout ended; ``env`` and ``task`` say where, for people."""

    rollout_id: int
    split: Split
    env: str
    task: str
    version: int  # live when it started
    rollout: Rollout | None
    error: str = ""
    is_engine_fault: bool = (
        False  # nobody could have done it just then: worth another try, not the rollout's fault
    )
    fatal: PrimerlError | None = None  # every rollout of this recipe would end so


class RolloutRunner:
    def __init__(
        self,
        recipe: Recipe,
        envs: dict[Split, list[EnvHandle]],
        *,
        live_version: Callable[[], int],
        router_url: Callable[[], str | None],
        distillation: Distillation | None = None,
    ) -> None:
        """``router_url``: where rollouts sample now; None while the router is down. Evaluation needs no ``distillation``."""
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
        """Have whoever waits for an outcome look around: something else changed."""
        self.outcomes.put_nowait(None)

    def start(self, start: Start) -> None:
        task = asyncio.create_task(self._run(start), name=f"rollout-{start.rollout_id}")
        self._tasks[start.rollout_id] = task
        task.add_done_callback(lambda done: self._ended(start, done))

    def cancel(self, rollout_ids: tuple[int, ...]) -> None:
        for rollout_id in rollout_ids:
            if (task := self._tasks.pop(rollout_id, None)) is not None:
                task.cancel()

    async def close(self) -> None:
        """Cancel what is in flight; the environment servers abort it and the engines drop its requests.

        Bounded, because it also runs on SIGTERM: what a busy machine does not get done in time ends with the servers.
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
            logger.warning("%d rollouts were not taken back within %.0f s", len(tasks), CLOSE_S)

    def _ended(self, start: Start, task: asyncio.Task[None]) -> None:
        """A task that we did not cancel has an outcome, also when it ended in a way nobody foresaw."""
        if self._tasks.pop(start.rollout_id, None) is None:
            return
        if task.cancelled():
            self._failed(start, "Cancelled: by its client", is_engine_fault=True)
        elif (error := task.exception()) is not None:
            logger.error("rollout %d", start.rollout_id, exc_info=error)
            self._failed(start, f"{type(error).__name__}: {error}")

    async def _run(self, start: Start) -> None:
        started = time.monotonic()
        try:
            rollout = await self._rollout(start)
        except RolloutFailed as error:
            self._failed(start, str(error), is_engine_fault=error.is_engine_fault)
        except EnvServerDied as error:
            self._failed(start, f"EnvServerDied: {error}", is_engine_fault=True)
        except (EnvServerError, TimeoutError) as error:
            self._failed(start, f"{type(error).__name__}: {error}")
        except ConfigError as error:
            self.outcomes.put_nowait(
                Outcome(start.rollout_id, *self._where(start), None, str(error), fatal=error)
            )
        else:
            rollout.last_version = self.live_version()
            rollout.seconds = time.monotonic() - started
            self.outcomes.put_nowait(Outcome(start.rollout_id, *self._where(start), rollout))

    def _failed(self, start: Start, error: str, *, is_engine_fault: bool = False) -> None:
        self.outcomes.put_nowait(Outcome(start.rollout_id, *self._where(start), None, error, is_engine_fault))

    def _where(self, start: Start) -> tuple[Split, str, str, int]:
        handle = self.envs[start.split][start.env]
        return start.split, handle.environment.label, handle.tasks[start.task].key, start.version

    async def _rollout(self, start: Start) -> Rollout:
        handle = self.envs[start.split][start.env]
        data = handle.tasks[start.task].data
        algorithm = self.recipe.algorithms[start.env] if start.split is Split.TRAIN else None
        if algorithm is not None and algorithm.samples_from == "teacher":
            return await self._rollout_of_teacher(handle, start)
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

    async def _rollout_of_teacher(self, handle: EnvHandle, start: Start) -> Rollout:
        assert self.distillation is not None
        teacher = self.distillation.teacher
        assert teacher is not None  # the recipe is validated
        episode = await handle.client.run(
            handle.tasks[start.task].data,
            external_client(teacher.next_address()),
            teacher.config.model.name,
            external_sampling_config(handle.sampling(self.recipe.rollouts.sampling)),
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
        known = self._sampling_configs.get((start.split, start.env))
        if known is None or known[0] != start.version:
            config = external_sampling_config(sampling) if self.external else None
            known = (start.version, config or sampling_config(sampling, start.version))
            self._sampling_configs[start.split, start.env] = known
        return known[1]
