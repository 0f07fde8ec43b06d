"""Takes a share of the group's mean reward away from rollouts that are long beside their siblings."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.recipe.rollout_schema import LengthPenalty


def penalize_length(
    penalty: LengthPenalty,
    rewards: NDArray[np.float64],
    output_tokens: NDArray[np.int64],
    input_tokens: NDArray[np.int64],
    num_turns: NDArray[np.int64],
) -> NDArray[np.float64]:
    """r'_i = r_i - p (w_out out_i/max out + w_in in_i/max in + w_turn turns_i/max turns), p = mean(r). Shapes [G].

    ``output_tokens`` were sampled; ``input_tokens`` are prompt and environment replies.
    """

    def relative(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        return counts / max(int(counts.max()), 1)

    share = (
        penalty.output_weight * relative(output_tokens)
        + penalty.input_weight * relative(input_tokens)
        + penalty.turn_weight * relative(num_turns)
    )
    return rewards - rewards.mean() * share
