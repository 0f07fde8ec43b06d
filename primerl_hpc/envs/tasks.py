"""Loads environments and their tasks through verifiers, with errors that name the environment.

    tasks = load_tasks(environment)             # [EnvironmentTask(key="hello", data={…}), …]

The orchestrator owns the tasks and ships each one's data with the request; an environment server never loads data.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from primerl_hpc.common.errors import ConfigError, DataError
from primerl_hpc.envs import expose_shipped
from primerl_hpc.envs.config import DEFAULT_HARNESS, environment_config
from primerl_hpc.recipe.rollout_schema import Environment

MAX_INFINITE_TASKS = 65_536
"""An endless taskset is cut here."""


@dataclass(frozen=True)
class EnvironmentTask:
    key: str
    """Stable identity of the task: the same in every run."""
    data: dict[str, Any]
    """What an environment server needs to run it (JSON)."""


def resolve_environment(environment: Environment) -> Any:
    """verifiers' own EnvConfig of the environment's class.

    Raises ConfigError for an id that cannot be imported and for arguments the environment does not take.
    """
    from pydantic import ValidationError
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils import loaders

    expose_shipped()
    place = f"environment {environment.label}"
    try:
        fields = loaders.env_config_type(environment.id, environment.env_args.get("id", "")).model_fields
        roles = tuple(name for name, field in fields.items() if isinstance(field.default, AgentConfig))
        own = loaders.default_harness_id(environment.id)
        harness = own if own == environment.id else DEFAULT_HARNESS  # a package may bring its own
        return loaders.resolve_env_config(environment_config(environment, roles=roles, harness=harness))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{key}: {first['msg']}", place=place, mend="see args and env_args") from error
    except ModuleNotFoundError as error:
        cause = error if error.name else error.__cause__  # verifiers wraps the import's own error
        module = getattr(cause, "name", None) or environment.id
        raise ConfigError(
            f"importing '{environment.id}' found no module '{module}'",
            place=place,
            mend="install its package, or correct the id",
        ) from error
    except Exception as error:
        raise ConfigError(f"cannot be loaded: {type(error).__name__}: {error}", place=place) from error


def agents_of(environment: Environment) -> list[str]:
    """Names of the agents that the environment declares. Raises ConfigError as `resolve_environment`."""
    from verifiers.v1.configs.agent import agent_config_fields

    return list(agent_config_fields(resolve_environment(environment)))


def load_tasks(environment: Environment, limit: int | None = None) -> list[EnvironmentTask]:
    """The environment's tasks in its own order, at most ``limit``.

    Raises ConfigError as `resolve_environment`, DataError when loading raises, there are no tasks, or two tasks have
    one key.
    """
    import verifiers.v1 as vf

    config = resolve_environment(environment)
    place = f"environment {environment.label}"
    try:
        taskset = vf.load_taskset(config.taskset)
        if not taskset.bounded:
            limit = min(limit or MAX_INFINITE_TASKS, MAX_INFINITE_TASKS)
        tasks = [
            EnvironmentTask(task.key, task.data.model_dump(mode="json"))
            for task in itertools.islice(taskset, limit)
        ]
    except Exception as error:
        raise DataError(f"loading its tasks failed: {type(error).__name__}: {error}", place=place) from error
    if not tasks:
        raise DataError("it has no tasks", place=place, mend="see args")
    keys: set[str] = set()
    for task in tasks:
        if task.key in keys:
            raise DataError(f"two of its tasks have the key {task.key!r}", place=place)
        keys.add(task.key)
    return tasks
