"""The train loop built from its real components, for tests that call parts of it before or without its start-up.

loop = make_train_loop(RunDir(tmp_path), recipe)            # nothing is connected, no server runs
starts = loop.dispatcher.next_starts(0)
end_group(loop.dispatcher, starts, [synthetic_rollout(1.0), synthetic_rollout(0.0)])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from verifiers.v1.episode import WireEpisode

from primerl_hpc.common.names import Role, process_name
from primerl_hpc.envs.tasks import EnvironmentTask
from primerl_hpc.orchestrator.components import build_components
from primerl_hpc.orchestrator.engines.fleet import Fleet
from primerl_hpc.orchestrator.rollout_data import Group, Rollout, Sample, Split, Start
from primerl_hpc.orchestrator.rollouts.distillation import Distillation
from primerl_hpc.orchestrator.rollouts.env_client import EnvServerClient
from primerl_hpc.orchestrator.rollouts.env_pool import EnvServerPool
from primerl_hpc.orchestrator.rollouts.environments import EnvHandle
from primerl_hpc.orchestrator.scheduling.dispatcher import Dispatcher
from primerl_hpc.orchestrator.setup import RouterAddress, make_fleet
from primerl_hpc.orchestrator.train_loop import Orchestrator
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.rollout import Environment
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import make_plan, process_plan

TASKS = tuple("abcd")
"""Keys of the tasks that every environment has unless a test gives its own handles."""


def make_train_loop(
    run: RunDir,
    recipe: Recipe,
    *,
    eval_handles: Sequence[EnvHandle] | None = None,
    fleet: Fleet | None = None,
    router_url: str | None = None,
) -> Orchestrator:
    """Build the train loop of ``recipe`` in ``run``, as of the run's last complete checkpoint."""
    (phase,) = make_plan(run.root, recipe, processes=[process_plan(Role.TRAINER)]).phases
    envs = {
        Split.TRAIN: [make_handle(run, environment) for environment in recipe.environments.train],
        Split.EVAL: [make_handle(run, environment) for environment in recipe.environments.eval]
        if eval_handles is None
        else list(eval_handles),
    }
    distillation = Distillation(run, recipe)
    components = build_components(run, phase, RouterAddress(run, router_url), envs, 0, distillation)
    return Orchestrator(run, phase, fleet or make_fleet(run, recipe), envs, components, distillation)


def make_handle(run: RunDir, environment: Environment, *published: dict[str, Any]) -> EnvHandle:
    """Return an environment with `TASKS` whose servers published these endpoints, if any; none is connected."""
    clients = [
        EnvServerClient(run, process_name(Role.ENV_SERVER, index), environment)
        for index in range(max(1, len(published)))
    ]
    for client, endpoint in zip(clients, published, strict=False):
        client.published = endpoint
    client = clients[0] if len(clients) == 1 else EnvServerPool(clients)
    return EnvHandle(environment, client, [EnvironmentTask(key, {"prompt": key}) for key in TASKS])


class RecordedEnvironment:
    """Stands in for an environment's server: every rollout is this episode."""

    published_endpoints: tuple[dict[str, Any], ...] = ()
    episodes: Mapping[str, int] = MappingProxyType({})

    def __init__(self, played: WireEpisode) -> None:
        self.played = played

    async def run(self, *_: object, **__: object) -> WireEpisode:
        return self.played

    async def close(self) -> None:
        """Nothing is connected."""


class RecordingRunner:
    """Runs no rollout: records what it is asked to start."""

    episodes: Mapping[str, int] = MappingProxyType({})

    def __init__(self) -> None:
        self.started: list[Start] = []

    def start(self, start: Start) -> None:
        self.started.append(start)

    def wake(self) -> None:
        """Nothing waits for outcomes."""


def synthetic_rollout(reward: float) -> Rollout:
    """Return a rollout of three prompt tokens and three sampled ones."""
    mask = np.arange(6) >= 3
    sample = Sample(np.arange(6), mask, np.zeros(6, np.float32), temperature=1.0)
    return Rollout(reward, [sample], output_tokens=3, input_tokens=3, num_turns=1, is_truncated=False)


def end_group(dispatcher: Dispatcher, starts: Sequence[Start], results: Sequence[Rollout]) -> Group:
    """Finish the started rollouts of a group with these results, and return the group."""
    groups = [
        dispatcher.finished(start.rollout_id, result) for start, result in zip(starts, results, strict=True)
    ]
    assert groups[-1] is not None, "the group has other rollouts"
    return groups[-1]


def fail_group(dispatcher: Dispatcher, starts: Sequence[Start]) -> Group:
    """Let the started rollouts of a group fail, and all of their retries, and return the group."""
    pending = list(starts)
    while pending:
        for start in pending:
            group = dispatcher.failed(start.rollout_id)
        if group is not None:
            return group
        pending = [start for start in dispatcher.next_starts(0) if start.group_id == starts[0].group_id]
    raise AssertionError("the group is not open")
