"""Check a recipe's environments before submission, in the interpreter that will serve them. Imports nothing heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from primerl_hpc.cluster.load import LoadedProfile
from primerl_hpc.common.document import Document
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import MAIN_PHASE, Kind, Role
from primerl_hpc.launch.prepare import interpreter_here, package_root
from primerl_hpc.plan.env import process_env
from primerl_hpc.plan.types import Plan
from primerl_hpc.recipe.schema.rollout import Environment

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class _Asked:
    environment: Environment
    path: tuple[str | int, ...]
    """Location of the block in the recipe."""
    role: Role
    """The role whose interpreter loads it."""


def check_environments(plan: Plan, profile: LoadedProfile, document: Document) -> None:
    """Raise ConfigError for an environment's id or argument that a run would reject, with its file and line.

    Prints a note if the interpreter cannot check it: without verifiers, or inside a container.
    """
    asked = _asked_of(plan)
    for role in dict.fromkeys(item.role for item in asked):
        _check([item for item in asked if item.role == role], role, plan, profile, document)


def _asked_of(plan: Plan) -> list[_Asked]:
    recipe = plan.phase(MAIN_PHASE).recipe
    loader = Role.EVALUATOR if recipe.kind == Kind.EVAL else Role.ORCHESTRATOR
    after = recipe.after.evaluation if recipe.after is not None else None
    blocks: list[tuple[Any, tuple[str, ...]]] = [
        (recipe.environments.train, ("environments", "train")),
        (recipe.environments.eval, ("environments", "eval")),
        (after.environments if after is not None else (), ("after", "evaluation", "environments")),
    ]
    return [
        _Asked(environment, (*path, index), Role.ENV_SERVER if environment.address is None else loader)
        for environments, path in blocks
        for index, environment in enumerate(environments)
    ]


def _check(asked: list[_Asked], role: Role, plan: Plan, profile: LoadedProfile, document: Document) -> None:
    software = profile.profile.software.of_role(role)
    if software.container.kind != "none":
        _note(f"they run in the container {software.container.image}")
        return
    python = software.python or interpreter_here(profile)
    variables = process_env(role, plan.phase(MAIN_PHASE).recipe, profile.profile)
    found = _look_up(python, variables, [item.environment for item in asked])
    if isinstance(found, str):
        _note(found)
        return
    for fault in found["faults"]:
        item = asked[fault["index"]]
        location = document.location((*item.path, *fault["key"])) or f"environment {item.environment.label}"
        error = ConfigError(fault["cause"], location=location, hint=fault["hint"])
        if fault["is_certain"]:
            raise error
        print(f"warning: {error}", file=sys.stderr)


def _look_up(
    python: str, variables: Mapping[str, str], environments: list[Environment]
) -> dict[str, Any] | str:
    """Return the output of `primerl_hpc.envs.lookup`, or text that explains why there is none."""
    blocks = [
        environment.model_dump(mode="json", include={"id", "args", "env_args"})
        for environment in environments
    ]
    answer = ask(python, variables, "primerl_hpc.envs.lookup", blocks)
    return answer if isinstance(answer, str) or answer["has_verifiers"] else f"{python} has no verifiers here"


def ask(python: str, variables: Mapping[str, str], module: str, request: Any) -> dict[str, Any] | str:
    """Return the output of a module of this package in a role's interpreter, or text that explains why there is none.

    The module reads ``request`` as JSON from stdin; its last line is a JSON object.
    """
    paths = [package_root(), variables.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    environ = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    environ["PYTHONSAFEPATH"] = "1"  # as for roles: modules in the working directory are not imported
    try:
        done = subprocess.run(
            [python, "-m", module],
            input=json.dumps(request),
            env=environ,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        answer = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    except subprocess.TimeoutExpired:
        return f"{python} did not answer within {TIMEOUT_S:.0f} s"
    except (OSError, ValueError, IndexError) as error:
        return f"{python} cannot be run here ({error})"
    if answer is None:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"{python} cannot be run here ({last})"
    return answer


def _note(reason: str) -> None:
    print(f"note: ids and arguments of environments were not checked: {reason}", file=sys.stderr)
