"""Rewards of a group → advantages, one file per baseline. Pure NumPy.

Reading order: grpo → grpo_std → rloo → opo → max_rl → length_penalty. A new one is a file with a function
``(rewards [G], output_tokens [G]) -> advantages [G]`` and a line in ADVANTAGES.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from primerl_hpc.orchestrator.algorithms.grpo import grpo
from primerl_hpc.orchestrator.algorithms.grpo_std import grpo_std
from primerl_hpc.orchestrator.algorithms.length_penalty import penalize_length
from primerl_hpc.orchestrator.algorithms.max_rl import max_rl
from primerl_hpc.orchestrator.algorithms.opo import opo
from primerl_hpc.orchestrator.algorithms.rloo import rloo
from primerl_hpc.recipe.rollout_schema import Algorithm

Advantage = Callable[[NDArray[np.float64], NDArray[np.int64]], NDArray[np.float64]]

ADVANTAGES: dict[str, Advantage] = {
    "grpo": grpo,
    "grpo_std": grpo_std,
    "rloo": rloo,
    "opo": opo,
    "max_rl": max_rl,
}

EQUAL = (
    1e-9  # rewards closer than this are equal: rounding must not become a signal when divided by a tiny std
)


def compute_advantages(
    algorithm: Algorithm,
    rewards: ArrayLike,
    output_tokens: ArrayLike,
    input_tokens: ArrayLike,
    num_turns: ArrayLike,
) -> NDArray[np.float64]:
    """Advantages [G] of one group's rollouts; exact zeros where all (penalised) rewards are equal."""
    scores = np.asarray(rewards, dtype=np.float64)
    lengths = np.asarray(output_tokens, dtype=np.int64)
    if algorithm.length_penalty is not None:
        scores = penalize_length(
            algorithm.length_penalty,
            scores,
            lengths,
            np.asarray(input_tokens, dtype=np.int64),
            np.asarray(num_turns, dtype=np.int64),
        )
    if np.ptp(scores) < EQUAL:
        return np.zeros_like(scores)
    return ADVANTAGES[algorithm.type](scores, lengths)


__all__ = ["ADVANTAGES", "compute_advantages"]
