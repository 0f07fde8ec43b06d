"""Check a recipe's environments before submission, in the interpreter that will serve them. Imports nothing heavy."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from primerl_hpc.cluster.load import LoadedProfile
from primerl_hpc.common.document import Document
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.interpreters import InterpreterError, Interpreters, UsualAnswer
from primerl_hpc.common.names import MAIN_PHASE, Kind, Role
from primerl_hpc.plan.env import process_env
from primerl_hpc.plan.plan import Plan
from primerl_hpc.recipe.schema.rollout import Environment

_NO_FAULT = UsualAnswer({"has_verifiers": True, "faults": []})


@dataclass(frozen=True)
class _Asked:
    environment: Environment
    path: tuple[str | int, ...]
    """Location of the block in the recipe."""
    role: Role
    """The role whose interpreter loads it."""


def check_environments(
    plan: Plan, profile: LoadedProfile, document: Document, interpreters: Interpreters
) -> None:
    """Raise ConfigError for an environment's id or argument that a run would reject, with its file and line.

    Prints a note if the interpreter of the role that loads it cannot check it: without verifiers, or in a container.
    """
    asked = _asked_of(plan)
    for role in dict.fromkeys(item.role for item in asked):
        faults = _find_faults(
            [item for item in asked if item.role == role], role, plan, profile, interpreters
        )
        _report(faults, document)


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


def _find_faults(
    asked: list[_Asked], role: Role, plan: Plan, profile: LoadedProfile, interpreters: Interpreters
) -> list[tuple[_Asked, dict[str, Any]]]:
    """Return the faults that `primerl_hpc.envs.lookup` finds, each with its environment; print why it found nothing."""
    software = profile.profile.software.of_role(role)
    if software.container.kind != "none":
        _note(f"they run in the container {software.container.image}")
        return []
    python = software.python or profile.profile.software.python_here
    variables = process_env(role, plan.phase(MAIN_PHASE).recipe, profile.profile)
    fields = {"id", "args", "env_args"}
    blocks = [item.environment.model_dump(mode="json", include=fields) for item in asked]
    try:
        function = "primerl_hpc.envs.lookup:find_faults"
        found = interpreters.ask_unless_unchanged(python, variables, function, blocks, _NO_FAULT)
    except InterpreterError as error:
        _note(error.cause)
        return []
    if not found["has_verifiers"]:
        _note(f"{python} has no verifiers here")
    return [(asked[fault["index"]], fault) for fault in found["faults"]]


def _report(faults: list[tuple[_Asked, dict[str, Any]]], document: Document) -> None:
    for item, fault in faults:
        label, cause = item.environment.label, fault["cause"]
        location = document.location((*item.path, *fault["key"]))
        error = ConfigError(
            cause if label in cause else f"environment '{label}': {cause}",
            location=location,
            hint=fault["hint"],
        )
        if fault["is_certain"]:
            raise error
        print(f"warning: {error}", file=sys.stderr)


def _note(reason: str) -> None:
    print(f"note: ids and arguments of environments were not checked: {reason}", file=sys.stderr)
