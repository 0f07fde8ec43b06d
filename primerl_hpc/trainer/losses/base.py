"""What a loss gets and gives: vectors over the trained tokens of one forward."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class LossInputs:
    """T tokens that belong to the component (all vectors [T], float32)."""

    logprobs: Tensor  # log π, carries the gradient
    inference_logprobs: Tensor  # log μ
    advantages: Tensor
    ref_logprobs: Tensor
    sequence_ids: Tensor  # [T] int64, which sample a token is of
    num_sequences: int
    # tokens of a sequence in RL, on average over all ranks and micro-batches of the step
    mean_length: Tensor | float

    @property
    def log_ratio(self) -> Tensor:
        return self.logprobs - self.inference_logprobs

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Per token, the mean of ``values`` over the tokens of its own sequence."""
        return self._sequence_sum(values) / self.sequence_lengths

    @property
    def sequence_lengths(self) -> Tensor:
        """Per token, how many tokens its own sequence has."""
        return self._sequence_sum(torch.ones_like(self.inference_logprobs))

    def _sequence_sum(self, values: Tensor) -> Tensor:
        zeros = torch.zeros(self.num_sequences, device=values.device, dtype=values.dtype)
        return zeros.index_add(0, self.sequence_ids, values)[self.sequence_ids]


@dataclass
class TokenLoss:
    loss: Tensor  # [T]
    metrics: dict[str, Tensor] = field(
        default_factory=dict
    )  # name → [T]; reported as mean over the component


def clip_metrics(low: Tensor, high: Tensor) -> dict[str, Tensor]:
    """Fractions of tokens without a policy gradient, in all and by side."""
    return {
        "is_masked": (low | high).float(),
        "is_masked_low": low.float(),
        "is_masked_high": high.float(),
    }


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict]:
    """−min(r·A, clip(r, 1−low, 1+high)·A), PPO's surrogate (arXiv 1707.06347, eq. 7)."""
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    low = (advantages < 0) & (ratio.detach() < 1 - clip_low)
    high = (advantages > 0) & (ratio.detach() > 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages), clip_metrics(low, high)
