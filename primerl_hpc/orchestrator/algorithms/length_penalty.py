"""Length penalties: of two rollouts with equal rewards, the shorter one gets the larger value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.rollout_data import Rollout
from primerl_hpc.recipe.schema.algorithm import CorrectLengthPenalty, LengthPenalty, LinearLengthPenalty

ROUNDING = 8 * float(np.finfo(np.float32).eps)
"""Relative error of a reward that was computed in float32, by a few operations."""
SMALLEST = 1e-9
"""Rewards around 0 that are closer than this are equal: they are what is left of terms that cancel."""


def rounding_of(rewards: NDArray[np.float64]) -> float:
    """Return the difference up to which rewards of a group [G] are equal."""
    return max(SMALLEST, ROUNDING * float(np.abs(rewards).max()))


def penalize_length(penalty: LengthPenalty | None, group: Sequence[Rollout]) -> NDArray[np.float64]:
    """Return the group's rewards [G] after the penalty; unchanged if ``penalty`` is None."""
    rewards = np.asarray([rollout.reward for rollout in group], dtype=np.float64)
    if penalty is None:
        return rewards
    outputs = np.asarray([rollout.output_tokens for rollout in group], dtype=np.float64)
    inputs = np.asarray([rollout.input_tokens for rollout in group], dtype=np.float64)
    turns = np.asarray([rollout.num_turns for rollout in group], dtype=np.float64)
    if isinstance(penalty, LinearLengthPenalty):
        return _linear(penalty, rewards, outputs, inputs, turns)
    cost = turns if penalty.cost == "turns" else _tokens(penalty, outputs, inputs)
    return _correct(rewards, cost)


def _linear(
    penalty: LinearLengthPenalty,
    rewards: NDArray[np.float64],
    outputs: NDArray[np.float64],
    inputs: NDArray[np.float64],
    turns: NDArray[np.float64],
) -> NDArray[np.float64]:
    """r'_i = r_i - p (w_out out_i/max out + w_in in_i/max in + w_turn turns_i/max turns), p = max(mean(r), 0).

    A negative mean would turn the penalty into a reward for length.
    """
    share = (
        penalty.output_weight * outputs / max(outputs.max(), 1)
        + penalty.input_weight * inputs / max(inputs.max(), 1)
        + penalty.turn_weight * turns / max(turns.max(), 1)
    )
    return rewards - max(rewards.mean(), 0.0) * share


def _tokens(
    penalty: CorrectLengthPenalty, outputs: NDArray[np.float64], inputs: NDArray[np.float64]
) -> NDArray[np.float64]:
    return penalty.output_weight * outputs + penalty.input_weight * inputs


def _correct(rewards: NDArray[np.float64], cost: NDArray[np.float64]) -> NDArray[np.float64]:
    """r'_i = r_i (1 + clamp(1 - c_i / c̄, 0, 1)) where r_i = max r > 0, else r_i; c̄: mean cost where r_i = max r.

    Rewards that differ by rounding are equal: otherwise, only one rollout would be the best, and none get a bonus.
    """
    best = rewards.max()
    if best <= 0:
        return rewards
    is_best = rewards >= best - rounding_of(rewards)
    mean_cost = cost[is_best].mean()
    bonus = np.clip(1 - cost / mean_cost, 0, 1) if mean_cost > 0 else np.zeros_like(cost)
    return rewards * (1 + bonus * is_best)
