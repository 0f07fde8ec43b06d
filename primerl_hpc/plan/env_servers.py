"""Resolve ``environments.*.servers: auto``: one server for `ROLLOUTS_PER_SERVER` rollouts in flight, limited by cores.

A server is one process: 1 to 2 ms of CPU time per turn of a rollout, without the environment's own work
(`plan.predict.timing.host_cores`). Where a step time is predicted, `raise_servers` increases the number for fast
rollouts.
"""

from __future__ import annotations

import math

from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.rollout import Environment

ROLLOUTS_PER_SERVER = 256
CORES_PER_SERVER = 4  # cores of the node for each server; counted separately for training and evaluation


def resolve_servers(recipe: Recipe, cores: int) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe with numbers of servers, and notes with the reasons. ``cores``: of the servers' node."""
    environments = recipe.environments
    ratios = sum(environment.ratio for environment in environments.train)
    fractions = {
        "train": [environment.ratio / ratios for environment in environments.train],
        "eval": [1 / len(environments.eval) for _ in environments.eval],
    }
    notes: list[str] = []
    settled: dict[str, tuple[Environment, ...]] = {}
    for split, shares in fractions.items():
        of_split = getattr(environments, split)
        numbers = [
            _servers(recipe, environment, share, cores)
            for environment, share in zip(of_split, shares, strict=True)
        ]
        settled[split] = tuple(
            environment.model_copy(update={"servers": number})
            for environment, number in zip(of_split, numbers, strict=True)
        )
        notes += [
            f"environment {environment.label} ({split}): {number} servers, "
            f"one for {ROLLOUTS_PER_SERVER} rollouts in flight"
            for environment, number in zip(of_split, numbers, strict=True)
            if environment.servers == "auto" and number > 1
        ]
    return recipe.model_copy(update={"environments": environments.model_copy(update=settled)}), tuple(notes)


def raise_servers(recipe: Recipe, needed: int, cores: int) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe with at least ``needed`` servers for training where ``servers`` is auto, and notes.

    Environments share them by their ratios. ``cores``: of the servers' node; at most half of them are used.
    """
    resolved, _ = resolve_servers(recipe, cores)
    ratios = sum(environment.ratio for environment in recipe.environments.train)
    train, notes = list(recipe.environments.train), []
    for index, (environment, by_rule) in enumerate(zip(train, resolved.environments.train, strict=True)):
        share = environment.ratio / ratios
        number = min(math.ceil(needed * share), int(cores * share / 2))
        is_auto = environment.servers == "auto" and environment.address is None
        if is_auto and number > int(by_rule.servers):
            train[index] = environment.model_copy(update={"servers": number})
            notes.append(f"environment {environment.label} (train): {number} servers for the predicted rate")
    environments = recipe.environments.model_copy(update={"train": tuple(train)})
    return recipe.model_copy(update={"environments": environments}), tuple(notes)


def _servers(recipe: Recipe, environment: Environment, share: float, cores: int) -> int:
    if environment.servers != "auto":
        return environment.servers
    if environment.address is not None:
        return 1
    in_flight = recipe.rollouts.in_flight_ceiling * share
    if environment.max_concurrent is not None:
        in_flight = min(in_flight, environment.max_concurrent)
    most = int(cores * share / CORES_PER_SERVER)
    return max(1, min(math.ceil(in_flight / ROLLOUTS_PER_SERVER), most))
