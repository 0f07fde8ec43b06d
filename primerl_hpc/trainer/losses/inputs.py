"""Inputs and outputs of a loss: vectors over the trained tokens of one forward."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Largest log ratio that is exponentiated. e^20 = 4.9e8; float32 overflows at e^88, and 0 · inf in backward is NaN."""


@dataclass
class LossInputs:
    """T tokens that belong to the component (all vectors [T], float32)."""

    logprobs: Tensor  # log π, carries the gradient
    inference_logprobs: Tensor  # log μ
    advantages: Tensor
    ref_logprobs: Tensor
    sequence_ids: Tensor  # [T] int64, the sample of each token
    num_sequences: int
    # mean number of RL tokens per sequence, over all ranks and micro-batches of the step
    mean_length: Tensor | float

    @property
    def log_ratio(self) -> Tensor:
        return self.logprobs - self.inference_logprobs

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return for each token the mean of ``values`` over the tokens of its sequence."""
        return self._sequence_sum(values) / self.sequence_lengths

    @property
    def sequence_lengths(self) -> Tensor:
        """Number of tokens in each token's sequence."""
        return self._sequence_sum(torch.ones_like(self.inference_logprobs))

    def _sequence_sum(self, values: Tensor) -> Tensor:
        zeros = torch.zeros(self.num_sequences, device=values.device, dtype=values.dtype)
        return zeros.index_add(0, self.sequence_ids, values)[self.sequence_ids]


@dataclass
class TokenLoss:
    loss: Tensor  # [T]
    # name → [T]; reported as mean over the component
    metrics: dict[str, Tensor] = field(default_factory=dict)


def importance_ratio(log_ratio: Tensor, keep: Tensor | None = None) -> Tensor:
    """Return r = e^(log r), finite in value and gradient for every token.

    A log ratio above `MAX_LOG_RATIO` counts as `MAX_LOG_RATIO` and has no gradient. Tokens outside ``keep`` get 1,
    without a gradient: a mask that is applied after exp does not stop an infinite derivative.
    """
    if keep is not None:
        log_ratio = torch.where(keep, log_ratio, 0.0)
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def clip_metrics(low: Tensor, high: Tensor) -> dict[str, Tensor]:
    """Return indicators of tokens without a policy gradient, in total and by side."""
    return {
        "is_masked": (low | high).float(),
        "is_masked_low": low.float(),
        "is_masked_high": high.float(),
    }


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict]:
    """Return −min(r·A, clip(r, 1−low, 1+high)·A), PPO's surrogate (arXiv 1707.06347, eq. 7), and its metrics."""
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    low = (advantages < 0) & (ratio.detach() < 1 - clip_low)
    high = (advantages > 0) & (ratio.detach() > 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages), clip_metrics(low, high)
