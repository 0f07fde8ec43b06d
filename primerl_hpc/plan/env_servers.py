"""``environments.*.servers: auto`` as a number: a server for every so many rollouts in flight, as long as cores are there.

A server is one core's worth: 10 ms of CPU per turn of a rollout (verifiers). 256 rollouts of one turn and three seconds
keep it busy; longer ones keep it less busy.
"""

from __future__ import annotations

import math

from primerl_hpc.recipe.rollout_schema import Environment
from primerl_hpc.recipe.schema import Recipe

ROLLOUTS_PER_SERVER = 256
SHARE_OF_CORES = 4  # one in so many of their node's cores may be servers' of training, and of evaluation


def settle_servers(recipe: Recipe, cores: int) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with numbers of servers, and notes that say why. ``cores``: of the node that they run on."""
    environments = recipe.environments
    ratios = sum(each.ratio for each in environments.train)
    fractions = {
        "train": [each.ratio / ratios for each in environments.train],
        "eval": [1 / len(environments.eval) for _ in environments.eval],
    }
    notes: list[str] = []
    settled: dict[str, tuple[Environment, ...]] = {}
    for split, shares in fractions.items():
        every = getattr(environments, split)
        numbers = [_servers(recipe, each, share, cores) for each, share in zip(every, shares, strict=True)]
        settled[split] = tuple(
            each.model_copy(update={"servers": number}) for each, number in zip(every, numbers, strict=True)
        )
        notes += [
            f"environment {each.label} ({split}): {number} servers, each a core for {ROLLOUTS_PER_SERVER} rollouts in flight"
            for each, number in zip(every, numbers, strict=True)
            if each.servers == "auto" and number > 1
        ]
    return recipe.model_copy(update={"environments": environments.model_copy(update=settled)}), tuple(notes)


def _servers(recipe: Recipe, environment: Environment, share: float, cores: int) -> int:
    if environment.servers != "auto":
        return environment.servers
    if environment.address is not None:
        return 1
    in_flight = recipe.rollouts.in_flight_ceiling * share
    if environment.max_concurrent is not None:
        in_flight = min(in_flight, environment.max_concurrent)
    most = int(cores * share / SHARE_OF_CORES)
    return max(1, min(math.ceil(in_flight / ROLLOUTS_PER_SERVER), most))
