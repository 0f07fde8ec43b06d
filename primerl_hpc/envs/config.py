"""A recipe's environment block as a verifiers environment config. Pure; imports nothing heavy.

    environment_config(Environment(id="reverse-text", args={"split": "test"}))
    → {"taskset": {"id": "reverse-text", "split": "test"},
       "agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "inproc-chat"}}}

Runtime and harness are always named, because verifiers' defaults are a paid remote sandbox and a shell on this host.
"""

from __future__ import annotations

from typing import Any

from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.recipe.rollout_schema import Environment
from primerl_hpc.recipe.schema import Recipe

DEFAULT_HARNESS = "inproc-chat"


def environment_config(
    environment: Environment, *, roles: tuple[str, ...] = ("agent",), harness: str = DEFAULT_HARNESS
) -> dict[str, Any]:
    """``args`` are the taskset's, ``env_args`` go over everything else, key by key.

    ``roles``: the environment's agents (one, ``agent``, unless its package declares others); ``harness``: who plays
    them where ``env_args`` does not say.
    """
    seat = {"runtime": {"type": "subprocess"}, "harness": {"id": harness}}
    base = {"taskset": {"id": environment.id, **environment.args}, **{role: seat for role in roles}}
    return _merge(base, environment.env_args)


def environment_of(recipe: Recipe, index: int) -> tuple[str, Environment]:
    """Split and environment of ``env_server-<index>``. Raises NotFoundError."""
    found = recipe.environments.by_server
    if not 0 <= index < len(found):
        raise NotFoundError(f"the recipe has {len(found)} environment servers, there is no number {index}")
    return found[index]


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
