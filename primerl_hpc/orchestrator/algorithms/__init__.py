"""Compute training targets from the rewards of a group. Pure NumPy.

Reading order: length_penalty → base → group_baselines → agent_baselines → distillation_targets → custom.

To add an algorithm, write its class, its line in `ALGORITHMS`, and its block in ``recipe/schema/algorithm.py``, whose
class attributes state its rules (see `Method` there).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from primerl_hpc.orchestrator.algorithms.agent_baselines import HierarchicalGrpo, Rae
from primerl_hpc.orchestrator.algorithms.base import Algorithm
from primerl_hpc.orchestrator.algorithms.custom import Custom
from primerl_hpc.orchestrator.algorithms.distillation_targets import Opd, SftDistill
from primerl_hpc.orchestrator.algorithms.group_baselines import Echo, Grpo, GrpoStd, MaxRl, Opo, Rloo

if TYPE_CHECKING:
    from primerl_hpc.recipe.schema import algorithm as algorithm_schema
    from primerl_hpc.recipe.schema.recipe import Recipe

ALGORITHMS: dict[str, type[Algorithm]] = {
    "grpo": Grpo,
    "grpo_std": GrpoStd,
    "rloo": Rloo,
    "opo": Opo,
    "max_rl": MaxRl,
    "echo": Echo,
    "rae": Rae,
    "hierarchical_grpo": HierarchicalGrpo,
    "opd": Opd,
    "opsd": Opd,
    "sft_distill": SftDistill,
    "custom": Custom,
}
"""``type`` of a recipe's block → its class."""


def make_algorithm(config: algorithm_schema.Algorithm) -> Algorithm:
    """Return the algorithm of a recipe's block. Raises ConfigError if a function that it names cannot be imported."""
    return ALGORITHMS[config.type](config)


def algorithms_of(recipe: Recipe) -> list[Algorithm]:
    """Return one algorithm per training environment: the environment's own, else the recipe's."""
    return [make_algorithm(config) for config in recipe.algorithms]


__all__ = ["Algorithm", "algorithms_of", "make_algorithm"]
