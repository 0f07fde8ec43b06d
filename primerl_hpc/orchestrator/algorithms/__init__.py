"""Rewards of a group → what its tokens are trained on, one file per algorithm. Pure NumPy.

Reading order: base → grpo → grpo_std → rloo → opo → max_rl → length_penalty → rae → hierarchical_grpo → echo → opd →
opsd → sft_distill → custom.
A new one is a file named like its ``type``, which ends in ``ALGORITHM = <its class>``, and a block in
``recipe/algorithm_schema.py``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from primerl_hpc.orchestrator.algorithms.base import Algorithm

if TYPE_CHECKING:
    from primerl_hpc.recipe import algorithm_schema
    from primerl_hpc.recipe.schema import Recipe


def make_algorithm(config: algorithm_schema.Algorithm) -> Algorithm:
    """The algorithm of a recipe's block. Raises ConfigError when it names a function that cannot be imported."""
    return import_module(f"{__name__}.{config.type}").ALGORITHM(config)


def algorithms_of(recipe: Recipe) -> list[Algorithm]:
    """One for each training environment: its own where it has one, else the recipe's."""
    return [make_algorithm(config) for config in recipe.algorithms]


__all__ = ["Algorithm", "algorithms_of", "make_algorithm"]
