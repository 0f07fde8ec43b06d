"""Start-up: what an orchestrator or evaluator needs from its peers before the first rollout.

Environments' tasks are loaded here, environment servers and engines waited for, the router's address read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

from primerl_hpc.common.errors import ConfigError, TimeoutWaitingError
from primerl_hpc.common.names import Kind, Role, process_name
from primerl_hpc.common.patience import Patience
from primerl_hpc.common.rundir import RunDir, ensure_api_key, read_endpoint
from primerl_hpc.envs.tasks import agents_of, load_tasks
from primerl_hpc.orchestrator.concurrency import Concurrency
from primerl_hpc.orchestrator.dispatcher import Split
from primerl_hpc.orchestrator.env_client import EnvServerClient
from primerl_hpc.orchestrator.env_pool import EnvServerPool
from primerl_hpc.orchestrator.fleet import Fleet
from primerl_hpc.orchestrator.runner import EnvHandle
from primerl_hpc.orchestrator.teacher import TeacherClient
from primerl_hpc.plan.types import PhasePlan
from primerl_hpc.recipe.algorithm_schema import Algorithm, HierarchicalGRPO
from primerl_hpc.recipe.rollout_schema import Environment, EvalEnvironment, Rollouts, TrainEnvironment
from primerl_hpc.recipe.schema import Recipe
from primerl_hpc.transport.weights import WeightReader
from primerl_hpc.transport.weights_broadcast import BroadcastWeightReader
from primerl_hpc.transport.weights_delta import DeltaWeightReader
from primerl_hpc.transport.weights_filesystem import FilesystemWeightReader

ROUTER = process_name(Role.ROUTER, 0)
POLL_S = 0.2


@dataclass
class RouterAddress:
    """Where rollouts sample now; None while the router is down. A restarted router may have another port."""

    run: RunDir
    url: str | None = None
    _patience: Patience = field(default_factory=lambda: Patience("where the router is"))

    def refresh(self) -> str | None:
        with self._patience:
            endpoint = read_endpoint(self.run, ROUTER)
            self.url = endpoint["url"].rstrip("/") if endpoint else None
        return self.url


@dataclass
class ExternalAddress:
    """As `RouterAddress`, of a server elsewhere: it is where it is."""

    url: str

    def refresh(self) -> str:
        return self.url


def make_reader(run: RunDir, recipe: Recipe) -> WeightReader:
    """How policy versions come from the trainer: ``weights.transport``."""
    readers = {
        "filesystem": FilesystemWeightReader,
        "delta": DeltaWeightReader,
        "broadcast": BroadcastWeightReader,
    }
    return readers[recipe.weights.transport](run)


def make_fleet(run: RunDir, recipe: Recipe) -> Fleet:
    return Fleet(
        run,
        ensure_api_key(run),
        update_timeout_s=recipe.timeouts.weight_update_s,
        recompute_kv=recipe.inference.recompute_kv_on_update,
        workers_per_engine=recipe.layout.inference.accelerators_per_replica,
    )


async def load_environments(run: RunDir, recipe: Recipe) -> dict[Split, list[EnvHandle]]:
    """Tasks and clients of every environment, in the recipe's order; server i serves train then eval.

    An evaluation alone has no servers for the training environments that its recipe may bring along.
    Raises ConfigError and DataError naming the environment.
    """
    handles: dict[Split, list[EnvHandle]] = {Split.TRAIN: [], Split.EVAL: []}
    servers = enumerate(recipe.environments.by_server)
    for (split, _), same in groupby(servers, key=lambda server: (server[1][0], server[1][1].label)):
        numbers = [index for index, _ in same]
        environment = recipe.environments.by_server[numbers[0]][1]
        if recipe.kind == Kind.EVAL and split == "train":
            continue
        limit = environment.num_tasks if isinstance(environment, EvalEnvironment) else None
        tasks = await asyncio.to_thread(load_tasks, environment, limit)
        if isinstance(environment, TrainEnvironment):
            await asyncio.to_thread(check_agents, environment, environment.algorithm or recipe.algorithm)
        clients = [
            EnvServerClient(
                run, process_name(Role.ENV_SERVER, index), environment, health_s=recipe.timeouts.health_s
            )
            for index in numbers
        ]
        client = clients[0] if len(clients) == 1 else EnvServerPool(clients)
        handles[Split(split)].append(EnvHandle(environment, client, tasks))
    return handles


def check_agents(environment: Environment, algorithm: Algorithm) -> None:
    """Raises ConfigError when the environment has none of the agents that are to be compared inside an episode."""
    if not isinstance(algorithm, HierarchicalGRPO):
        return
    inside, agents = algorithm.episode_agents, agents_of(environment)
    if not set(agents) & set(inside):
        raise ConfigError(
            f"algorithm.episode_agents {sorted(inside)} are not among the environment's agents {sorted(agents)}",
            place=f"environment {environment.label}",
            mend="name those that are to be compared inside an episode",
        )


def make_concurrency(rollouts: Rollouts) -> Concurrency | None:
    """The controller of how many rollouts are in flight; None where the recipe fixes it."""
    config = rollouts.adaptive_concurrency
    if config is None:
        return None
    return Concurrency(config, start=config.start or rollouts.batch_size, ceiling=rollouts.in_flight_ceiling)


def vocab_size_for_filters(phase: PhasePlan) -> int:
    """The model's vocabulary where a rollout filter needs it; else 0, which costs nothing."""
    if not any(each.type == "gibberish" for each in phase.recipe.rollouts.filters):
        return 0
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        phase.model_path, trust_remote_code=phase.recipe.model.trust_remote_code
    )
    return int(config.get_text_config().vocab_size)


async def wait_for_peers(
    phase: PhasePlan,
    handles: dict[Split, list[EnvHandle]],
    fleet: Fleet | None,
    router: RouterAddress | ExternalAddress,
    teacher: TeacherClient | None = None,
) -> None:
    """All servers at the same time; without a fleet the environment servers alone.

    Raises TimeoutWaitingError naming who is missing.
    """
    timeouts = phase.recipe.timeouts
    engines = (*phase.of_role(Role.INFERENCE), *phase.of_role(Role.PREFILL))
    num_engines = len(engines) or min(1, len(phase.elastic))  # one elastic engine will do
    clients = [handle.client for each in handles.values() for handle in each]
    async with asyncio.TaskGroup() as group:
        if fleet is not None:
            group.create_task(fleet.wait_ready(num_engines, timeouts.inference_ready_s))
            group.create_task(_wait_for(ROUTER, router.refresh, timeouts.inference_ready_s))
        if teacher is not None:
            group.create_task(_wait_for("the teacher", teacher.refresh, timeouts.inference_ready_s))
        for client in clients:
            group.create_task(client.wait_ready(timeout_s=phase.recipe.env_server_ready_s))


async def _wait_for(name: str, is_there: Callable[[], object], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_there():
        if time.monotonic() >= deadline:
            raise TimeoutWaitingError(
                f"waited {timeout_s:.0f} s for {name}",
                mend="see logs/latest/inference/*.log and logs/latest/teacher/*.log",
            )
        await asyncio.sleep(POLL_S)
