"""Start-up: prepare what an orchestrator or evaluator needs from its peers before the first rollout.

Loads the tasks of environments, waits for environment servers and engines, and reads the router's address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

from primerl_hpc.common.errors import ConfigError, TimeoutWaitingError
from primerl_hpc.common.names import Kind, Role, process_name
from primerl_hpc.common.waiting import Polling, TransientIOErrors
from primerl_hpc.envs.tasks import agents_of, load_tasks, resolve_environment
from primerl_hpc.envs.tools import refuse_tools_without_renderer
from primerl_hpc.orchestrator.engines.fleet import Fleet, FleetOptions
from primerl_hpc.orchestrator.rollout_data import Split
from primerl_hpc.orchestrator.rollouts.env_client import EnvServerClient
from primerl_hpc.orchestrator.rollouts.env_pool import EnvServerPool
from primerl_hpc.orchestrator.rollouts.environments import EnvHandle
from primerl_hpc.orchestrator.rollouts.teacher import TeacherClient
from primerl_hpc.orchestrator.scheduling.concurrency import Concurrency
from primerl_hpc.plan.plan import PhasePlan
from primerl_hpc.recipe.schema.algorithm import Algorithm, HierarchicalGRPO
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.rollout import Environment, EvalEnvironment, Rollouts, TrainEnvironment
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.endpoints import EndpointWatch, read_endpoint
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.weights.broadcast import BroadcastWeightReader
from primerl_hpc.transport.weights.delta import DeltaWeightReader
from primerl_hpc.transport.weights.filesystem import FilesystemWeightReader
from primerl_hpc.transport.weights.sources import WeightReader

ROUTER = process_name(Role.ROUTER, 0)
POLL_S = 0.2


@dataclass
class RouterAddress:
    """Where rollouts sample now; ``url`` is None while the router is down. A restarted router may use another port."""

    run: RunDir
    url: str | None = None
    endpoints: EndpointWatch | None = None
    """The watch that others use too; None: the endpoint is read at each call of `refresh`."""
    _patience: TransientIOErrors = field(default_factory=lambda: TransientIOErrors("the router's endpoint"))

    def refresh(self) -> str | None:
        """Read the router's endpoint and return its URL."""
        with self._patience:
            watch = self.endpoints
            endpoint = read_endpoint(self.run, ROUTER) if watch is None else watch.get(ROUTER)
            self.url = endpoint["url"].rstrip("/") if endpoint else None
        return self.url

    def expect_change(self) -> None:
        """Read the endpoint again at the next call of `refresh`, because the router did not respond."""
        if self.endpoints is not None:
            self.endpoints.hurry()


@dataclass
class ExternalAddress:
    """Like `RouterAddress`, for a server outside the run, whose address is fixed."""

    url: str

    def refresh(self) -> str:
        return self.url

    def expect_change(self) -> None:
        """Nothing changes."""


def make_reader(run: RunDir, recipe: Recipe) -> WeightReader:
    """Return the reader of policy versions for ``weights.transport``."""
    readers = {
        "filesystem": FilesystemWeightReader,
        "delta": DeltaWeightReader,
        "broadcast": BroadcastWeightReader,
    }
    return readers[recipe.weights.transport](run)


def make_fleet(run: RunDir, recipe: Recipe) -> Fleet:
    return Fleet(
        run,
        run_keys(run),
        FleetOptions(
            update_timeout_s=recipe.timeouts.weight_update_s,
            recompute_kv=recipe.inference.recompute_kv_on_update,
            workers_per_engine=recipe.layout.inference.accelerators_per_replica,
        ),
    )


async def load_environments(
    run: RunDir, recipe: Recipe, endpoints: EndpointWatch | None = None
) -> dict[Split, list[EnvHandle]]:
    """Load the tasks of every environment and create its clients, which read ``endpoints`` together.

    Servers are numbered in the recipe's order, train then eval. If nothing is trained on rollouts, training
    environments in the recipe have no servers and are skipped. Raises ConfigError or DataError naming the environment.
    """
    handles: dict[Split, list[EnvHandle]] = {Split.TRAIN: [], Split.EVAL: []}
    servers = enumerate(recipe.environments.by_server)
    for (split, _), environment_servers in groupby(
        servers, key=lambda server: (server[1][0], server[1][1].label)
    ):
        numbers = [index for index, _ in environment_servers]
        environment = recipe.environments.by_server[numbers[0]][1]
        if recipe.kind != Kind.RL and split == "train":
            continue
        limit = environment.num_tasks if isinstance(environment, EvalEnvironment) else None
        tasks = await asyncio.to_thread(load_tasks, environment, limit)
        if environment.address is not None and not recipe.is_external:  # no server of the run checks it
            config = await asyncio.to_thread(resolve_environment, environment)
            await asyncio.to_thread(refuse_tools_without_renderer, environment, config, recipe.model)
        if isinstance(environment, TrainEnvironment):
            await asyncio.to_thread(check_agents, environment, environment.algorithm or recipe.algorithm)
        clients = [
            EnvServerClient(
                run,
                process_name(Role.ENV_SERVER, index),
                environment,
                health_s=recipe.timeouts.health_s,
                endpoints=endpoints,
            )
            for index in numbers
        ]
        client = clients[0] if len(clients) == 1 else EnvServerPool(clients)
        handles[Split(split)].append(EnvHandle(environment, client, tasks))
    return handles


def check_agents(environment: Environment, algorithm: Algorithm) -> None:
    """Raise ConfigError if the environment has none of the agents that are compared within an episode."""
    if not isinstance(algorithm, HierarchicalGRPO):
        return
    compared, agents = algorithm.episode_agents, agents_of(environment)
    if not set(agents) & set(compared):
        raise ConfigError(
            f"algorithm.episode_agents {sorted(compared)} are not among the environment's agents {sorted(agents)}",
            location=f"environment {environment.label}",
            hint="list the agents that are to be compared within an episode",
        )


def make_concurrency(rollouts: Rollouts) -> Concurrency | None:
    """Return the controller of the number of rollouts in flight; None if the recipe sets a fixed number."""
    config = rollouts.adaptive_concurrency
    if config is None:
        return None
    return Concurrency(config, start=config.start or rollouts.batch_size, ceiling=rollouts.in_flight_ceiling)


def vocab_size_for_filters(phase: PhasePlan) -> int:
    """Return the size of the model's vocabulary if a rollout filter needs it, else 0 (reads nothing)."""
    if not any(config.type == "gibberish" for config in phase.recipe.rollouts.filters):
        return 0
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        phase.model_path, trust_remote_code=phase.recipe.model.trust_remote_code
    )
    return int(config.get_text_config().vocab_size)


def names_of_peers(phase: PhasePlan) -> list[str]:
    """Return the processes for which `wait_for_peers` waits."""
    roles = (Role.INFERENCE, Role.PREFILL, Role.ROUTER, Role.TEACHER, Role.ENV_SERVER)
    return [process.name for role in roles for process in phase.of_role(role)]


async def wait_for_peers(
    phase: PhasePlan,
    handles: dict[Split, list[EnvHandle]],
    fleet: Fleet | None,
    router: RouterAddress | ExternalAddress,
    teacher: TeacherClient | None = None,
) -> None:
    """Wait for all servers at the same time; without a fleet, only for the environment servers.

    Raises TimeoutWaitingError naming the missing server.
    """
    timeouts = phase.recipe.timeouts
    engines = (*phase.of_role(Role.INFERENCE), *phase.of_role(Role.PREFILL))
    num_engines = len(engines) or min(1, len(phase.elastic))  # one elastic engine is enough
    clients = [handle.client for split_handles in handles.values() for handle in split_handles]
    async with asyncio.TaskGroup() as group:
        if fleet is not None:
            group.create_task(fleet.wait_ready(num_engines, timeouts.inference_ready_s))
            group.create_task(_wait_for(ROUTER, router.refresh, timeouts.inference_ready_s))
        if teacher is not None:
            group.create_task(_wait_for("the teacher", teacher.refresh, timeouts.inference_ready_s))
        for client in clients:
            group.create_task(client.wait_ready(timeout_s=phase.recipe.env_server_ready_s))


async def _wait_for(name: str, is_ready: Callable[[], object], timeout_s: float) -> None:
    async for _ in Polling(timeout_s, POLL_S):
        if is_ready():
            return
    raise TimeoutWaitingError(
        f"{name} was not ready after {timeout_s:.0f} s",
        hint="see logs/latest/inference/*.log and logs/latest/teacher/*.log",
    )
