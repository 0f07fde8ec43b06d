"""Translate a recipe's environment block to a verifiers environment config. Pure, without heavy imports.

    environment_config(Environment(id="reverse-text", args={"split": "test"}))
    → {"taskset": {"id": "reverse-text", "split": "test"},
       "agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "inproc-chat"}}}

Runtime and harness are always set, because verifiers' defaults are a paid remote sandbox and a shell on this host.
"""

from __future__ import annotations

from typing import Any

from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.rollout import Environment

DEFAULT_HARNESS = "inproc-chat"


def environment_config(
    environment: Environment, *, roles: tuple[str, ...] = ("agent",), harness: str = DEFAULT_HARNESS
) -> dict[str, Any]:
    """Return the config: ``args`` configure the taskset, and ``env_args`` override all other keys recursively.

    ``roles``: names of the environment's agents (``agent``, unless its package declares others). ``harness``: the
    harness that runs them unless ``env_args`` sets another.
    """
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": harness}}
    base = {"taskset": {"id": environment.id, **environment.args}, **{role: agent for role in roles}}
    return _merge(base, environment.env_args)


def environment_of(recipe: Recipe, index: int) -> tuple[str, Environment]:
    """Return split and environment of ``env_server-<index>``. Raises NotFoundError if there is no such server."""
    found = recipe.environments.by_server
    if not 0 <= index < len(found):
        raise NotFoundError(
            f"there is no environment server {index}: the recipe has {len(found)}, numbered from 0"
        )
    return found[index]


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
