"""Check ids and arguments of environments without a run, and load their tasks, in the interpreter that serves them.

`submit` calls `find_faults` there, and `prefetch` calls `count_tasks` (`common/interpreters.py`).

Ids are looked up without importing any package. Arguments are validated by the environment's own config classes; this
imports verifiers (about three seconds), so it is done only if there are arguments.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.node.imports import without_collections
from primerl_hpc.common.node.transformers_folders import read_models_once
from primerl_hpc.common.validate import nearest
from primerl_hpc.envs import SHIPPED, expose_shipped
from primerl_hpc.recipe.schema.rollout import Environment

_HARNESSES = frozenset(("inproc_chat",))  # shipped modules that are not environments


@without_collections()
def find_faults(environments: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the faults of these environments, each a dict with ``id``, ``args`` and ``env_args``.

        {"has_verifiers": true,
         "faults": [{"index": 0, "key": ["args", "splt"], "cause": …, "hint": …, "is_certain": true}]}

    ``is_certain``: True if a run would fail as well; False if it may be specific to this machine.
    """
    read_models_once()
    spec = importlib.util.find_spec("verifiers")
    if spec is None or not spec.submodule_search_locations:
        return {"has_verifiers": False, "faults": []}
    tasksets = Path(spec.submodule_search_locations[0]) / "v1" / "tasksets"
    expose_shipped()
    faults = [
        missing(index, environment["id"], tasksets)
        for index, environment in enumerate(environments)
        if not exists(environment["id"], tasksets)
    ]
    if not faults and any(environment["args"] or environment["env_args"] for environment in environments):
        checked = (_config_fault(index, environment) for index, environment in enumerate(environments))
        faults = [fault for fault in checked if fault is not None]
    return {"has_verifiers": True, "faults": faults}


def module_of(environment_id: str) -> str:
    """Return the module of an environment by verifiers' rule: ``owner/reverse-text@1.0`` → ``reverse_text``."""
    return environment_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def exists(environment_id: str, tasksets: Path) -> bool:
    """True if the environment's module can be found. ``tasksets``: folder of verifiers' own tasksets."""
    module = module_of(environment_id)
    if (tasksets / module).is_dir() or (tasksets / f"{module}.py").is_file():
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def missing(index: int, environment_id: str, tasksets: Path) -> dict[str, Any]:
    """Return the fault of an environment whose module cannot be found."""
    module = module_of(environment_id)
    near = nearest(module, sorted(known_modules(tasksets)))
    hint = (
        f"did you mean '{near.replace('_', '-')}'? If not, install" if near else "correct the id, or install"
    )
    return {
        "index": index,
        "key": ["id"],
        "cause": f"environment '{environment_id}' does not exist: {sys.executable} has no module '{module}'",
        "hint": f"{hint} its package: primerl-hpc env install PACKAGE",
        "is_certain": True,
    }


def known_modules(tasksets: Path) -> set[str]:
    """Return the modules of shipped environments, verifiers' own, and installed packages that require verifiers."""
    found = {module.name for module in pkgutil.iter_modules([str(SHIPPED)])} - _HARNESSES
    found |= {path.stem for path in tasksets.iterdir() if not path.name.startswith("_")}
    for distribution in importlib.metadata.distributions():
        if any(re.match(r"verifiers\b", requirement) for requirement in distribution.requires or ()):
            files = (file.parts[0] for file in distribution.files or () if file.suffix == ".py")
            found |= {name for name in files if name.isidentifier()} - {"primerl_hpc"}
    return found


def _config_fault(index: int, fields: dict[str, Any]) -> dict[str, Any] | None:
    """Load the environment's config. Returns the fault; None if it is valid."""
    from pydantic import ValidationError

    from primerl_hpc.envs.tasks import resolve_environment

    environment = Environment(**fields)
    try:
        resolve_environment(environment)
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, ValidationError):
            return {"index": index, "is_certain": True, **_argument_fault(environment, cause)}
        is_certain = isinstance(cause, (ModuleNotFoundError, TypeError, AttributeError, ValueError))
        return {
            "index": index,
            "key": ["id"],
            "cause": error.cause,
            "hint": error.hint,
            "is_certain": is_certain,
        }
    return None


def _argument_fault(environment: Environment, error: Any) -> dict[str, Any]:
    """Return the first invalid argument, by its key in the recipe."""
    first = error.errors(include_url=False)[0]
    loc = [str(part) for part in first["loc"]]
    key = ["args", *loc[1:]] if loc[:1] == ["taskset"] else ["env_args", *loc]
    if first["type"] != "extra_forbidden":
        message = first["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
        return {"key": key, "cause": f"{'.'.join(key)}: {message}", "hint": ""}
    fields = _fields_at(environment, loc[:-1])
    near = nearest(key[-1], fields)
    hint = f"did you mean '{near}'?" if near else f"valid arguments: {', '.join(fields)}" if fields else ""
    return {"key": key, "cause": f"unknown argument '{'.'.join(key)}'", "hint": hint}


def _fields_at(environment: Environment, path: list[str]) -> list[str]:
    """Return the names of the fields at ``path`` of the environment's config; empty if that is not a block."""
    from pydantic import BaseModel
    from verifiers.v1.utils import loaders

    block: Any = loaders.env_config_type(environment.id, environment.env_args.get("id", ""))
    if path[:1] == ["taskset"]:
        block, path = loaders.taskset_config_type(environment.id), path[1:]
    for part in path:
        field = block.model_fields.get(part)
        block = field.annotation if field is not None else None
        if not (isinstance(block, type) and issubclass(block, BaseModel)):
            return []
    return [name for name in block.model_fields if name not in ("id", "task")]


@without_collections()
def count_tasks(fields: dict[str, Any]) -> int:
    """Load all tasks of an environment, which fills the caches of its datasets. Raises as `load_tasks`."""
    from primerl_hpc.envs.tasks import load_tasks

    return len(load_tasks(Environment(**fields)))
