"""Compute training targets from the rewards of a group, one file per algorithm. Pure NumPy.

Reading order: base → grpo → grpo_std → rloo → opo → max_rl → length_penalty → rae → hierarchical_grpo → echo → opd →
opsd → sft_distill → custom.

To add an algorithm, add a file named like its ``type`` that ends in ``ALGORITHM = <its class>``, and its block in
``recipe/schema/algorithm.py``, whose class attributes state its rules (see `Method` there).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from primerl_hpc.orchestrator.algorithms.base import Algorithm

if TYPE_CHECKING:
    from primerl_hpc.recipe.schema import algorithm as algorithm_schema
    from primerl_hpc.recipe.schema.recipe import Recipe


def make_algorithm(config: algorithm_schema.Algorithm) -> Algorithm:
    """Return the algorithm of a recipe's block. Raises ConfigError if a function that it names cannot be imported."""
    return import_module(f"{__name__}.{config.type}").ALGORITHM(config)


def algorithms_of(recipe: Recipe) -> list[Algorithm]:
    """Return one algorithm per training environment: the environment's own, else the recipe's."""
    return [make_algorithm(config) for config in recipe.algorithms]


__all__ = ["Algorithm", "algorithms_of", "make_algorithm"]
