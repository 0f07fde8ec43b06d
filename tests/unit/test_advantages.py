"""Advantage functions against the plain formulas of their sources, written out rollout by rollout."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from primerl_hpc.orchestrator.algorithms import ADVANTAGES, compute_advantages
from primerl_hpc.recipe.rollout_schema import Algorithm, LengthPenalty

REWARDS = [0.0, 1.0, 0.25, 0.5, 1.0]
LENGTHS = [10, 40, 5, 20, 80]
MEAN = sum(REWARDS) / 5


def advantages_of(kind: str, rewards=REWARDS, lengths=LENGTHS, **more):
    size = len(rewards)
    return compute_advantages(Algorithm(type=kind, **more), rewards, lengths, [7] * size, [1] * size)


def _rloo(i: int) -> float:
    others = REWARDS[:i] + REWARDS[i + 1 :]
    return REWARDS[i] - sum(others) / len(others)


OPO_BASELINE = sum(r * n for r, n in zip(REWARDS, LENGTHS, strict=True)) / sum(LENGTHS)
PLAIN = {
    "grpo": lambda i: REWARDS[i] - MEAN,
    "grpo_std": lambda i: (REWARDS[i] - MEAN) / statistics.stdev(REWARDS),
    "rloo": _rloo,
    "opo": lambda i: REWARDS[i] - OPO_BASELINE,
    "max_rl": lambda i: (REWARDS[i] - MEAN) / MEAN,
}


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
def test_advantage_equals_the_plain_formula(kind):
    np.testing.assert_allclose(advantages_of(kind), [PLAIN[kind](i) for i in range(5)], rtol=1e-6)


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3, 0.3], [0.0, 0.0], [1.0]])
def test_equal_rewards_give_exact_zeros_whatever_the_rounding(kind, rewards):
    assert not advantages_of(kind, rewards, [3] * len(rewards)).any()


def test_max_rl_is_zero_where_the_mean_reward_is_not_positive():
    assert not advantages_of("max_rl", [-1.0, 0.5, 0.5], [1, 2, 3]).any()


def test_every_recipe_algorithm_has_its_function():
    kinds = Algorithm.model_fields["type"].annotation.__args__
    assert set(kinds) == set(ADVANTAGES)


def test_length_penalty_takes_a_share_of_the_mean_reward_from_the_longest():
    penalty = LengthPenalty(output_weight=0.25, input_weight=0.1, turn_weight=0.1)
    found = compute_advantages(
        Algorithm(type="grpo", length_penalty=penalty), [1.0, 1.0], [50, 100], [10, 10], [1, 2]
    )
    penalised = [1 - (0.25 * 0.5 + 0.1 + 0.1 * 0.5), 1 - (0.25 + 0.1 + 0.1)]
    np.testing.assert_allclose(found, np.array(penalised) - np.mean(penalised))


def test_length_penalty_leaves_a_group_without_reward_alone():
    penalty = LengthPenalty()
    algorithm = Algorithm(type="grpo", length_penalty=penalty)
    assert not compute_advantages(algorithm, [0.0, 0.0], [5, 50], [1, 1], [1, 1]).any()
