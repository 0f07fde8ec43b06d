"""Load environments and their tasks through verifiers, with errors that name the environment.

    tasks = load_tasks(environment)             # [EnvironmentTask(key="hello", data={…}), …]

The orchestrator loads the tasks and sends the data of a task with each request; environment servers never load data.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from primerl_hpc.common.errors import ConfigError, DataError
from primerl_hpc.envs import expose_shipped
from primerl_hpc.envs.config import DEFAULT_HARNESS, environment_config
from primerl_hpc.envs.serving.deferred import defer_imports
from primerl_hpc.recipe.schema.rollout import Environment

MAX_INFINITE_TASKS = 65_536
"""Number of tasks that are used of an infinite taskset."""


@dataclass(frozen=True)
class EnvironmentTask:
    """A task as the orchestrator sends it to an environment server."""

    key: str
    """Stable id of the task, the same in every run."""
    data: dict[str, Any]
    """The data that an environment server needs to run the task (JSON)."""


def fingerprint_of(tasks: Sequence[EnvironmentTask]) -> str:
    """Return 16 hexadecimal digits that depend on the keys of the tasks and their order."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(f"{len(task.key)} {task.key}\n".encode())
    return digest.hexdigest()[:16]


def resolve_environment(environment: Environment) -> Any:
    """Return verifiers' EnvConfig of the environment.

    Raises ConfigError if the id cannot be imported or an argument is invalid.
    """
    from pydantic import ValidationError

    defer_imports()
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils import loaders

    expose_shipped()
    location = f"environment {environment.label}"
    try:
        fields = loaders.env_config_type(environment.id, environment.env_args.get("id", "")).model_fields
        roles = tuple(name for name, field in fields.items() if isinstance(field.default, AgentConfig))
        own = loaders.default_harness_id(environment.id)
        harness = own if own == environment.id else DEFAULT_HARNESS  # a package may contain its own harness
        return loaders.resolve_env_config(environment_config(environment, roles=roles, harness=harness))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{key}: {first['msg']}", location=location, hint="correct args or env_args"
        ) from error
    except ModuleNotFoundError as error:
        cause = error if error.name else error.__cause__  # verifiers wraps the original ModuleNotFoundError
        module = getattr(cause, "name", None) or environment.id
        raise ConfigError(
            f"importing '{environment.id}' failed: there is no module '{module}'",
            location=location,
            hint="install its package, or correct the id",
        ) from error
    except Exception as error:
        raise ConfigError(
            f"the environment cannot be loaded: {type(error).__name__}: {error}", location=location
        ) from error


def agents_of(environment: Environment) -> list[str]:
    """Return the names of the agents that the environment declares. Raises ConfigError as `resolve_environment`."""
    config = resolve_environment(environment)  # before verifiers is imported here: it defers imports
    from verifiers.v1.configs.agent import agent_config_fields

    return list(agent_config_fields(config))


def location_of(environment: Environment) -> str:
    """Return the file of the environment's module. Call `resolve_environment` first, which reports import errors."""
    from verifiers.v1.utils import loaders

    return loaders.import_taskset(environment.id).__file__ or ""


def load_tasks(environment: Environment, limit: int | None = None) -> list[EnvironmentTask]:
    """Return at most ``limit`` of the environment's tasks, in its own order.

    Raises ConfigError as `resolve_environment`; DataError if loading fails, there are no tasks, or two tasks have the
    same key.
    """
    config = resolve_environment(environment)  # before verifiers is imported here: it defers imports
    import verifiers.v1 as vf

    location = f"environment {environment.label}"
    try:
        taskset = vf.load_taskset(config.taskset)
        if not taskset.bounded:
            limit = min(limit or MAX_INFINITE_TASKS, MAX_INFINITE_TASKS)
        tasks = [
            EnvironmentTask(task.key, task.data.model_dump(mode="json"))
            for task in itertools.islice(taskset, limit)
        ]
    except Exception as error:
        raise DataError(
            f"the tasks cannot be loaded: {type(error).__name__}: {error}", location=location
        ) from error
    if not tasks:
        raise DataError("the environment has no tasks", location=location, hint="check args")
    keys: set[str] = set()
    for task in tasks:
        if task.key in keys:
            raise DataError(f"two tasks have the same key {task.key!r}", location=location)
        keys.add(task.key)
    return tasks
