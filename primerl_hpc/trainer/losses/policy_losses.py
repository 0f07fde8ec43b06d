"""The losses on tokens with advantages, one function each, and the reverse KL of on-policy distillation.

Notation: π trainer and μ inference probability of the sampled token, r = π/μ, A advantage, sg stop-gradient. To add a
loss, write its function, its line in `LOSSES`, and its block in ``recipe/schema/training.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from primerl_hpc.recipe.schema.training import CISPOLoss, DPPOLoss, GRPOLoss, GSPOLoss, IPOLoss
from primerl_hpc.trainer.losses.custom import custom
from primerl_hpc.trainer.losses.inputs import (
    LossInputs,
    TokenLoss,
    clip_metrics,
    clipped_surrogate,
    importance_ratio,
)

MASK_LOW, KL_TAU = 0.2, 1e-3
"""Constants of `ref_kl`."""


def dppo(x: LossInputs, config: DPPOLoss) -> TokenLoss:
    """DPPO: policy gradient with a trust region on the probability difference Δp = π − μ (binary total variation).

    A token is dropped if (A > 0 and Δp > mask_high) or (A ≤ 0 and Δp < −mask_low).
    loss = −keep · (adv_tau·A) · r + kl_tau · (log r)²; the second term applies to every token, dropped or not.
    """
    with torch.no_grad():
        delta = x.logprobs.exp() - x.inference_logprobs.exp()
        high = (x.advantages > 0) & (delta > config.mask_high)
        low = (x.advantages <= 0) & (delta < -config.mask_low)
    return _masked_gradient(x, low, high, config)


def ipo(x: LossInputs, config: IPOLoss) -> TokenLoss:
    """IPO: like DPPO, but a token is dropped if |π − μ| > threshold, whatever the sign of its advantage."""
    with torch.no_grad():
        delta = x.logprobs.exp() - x.inference_logprobs.exp()
        high, low = delta > config.threshold, delta < -config.threshold
    return _masked_gradient(x, low, high, config)


def _masked_gradient(x: LossInputs, low: Tensor, high: Tensor, config: DPPOLoss | IPOLoss) -> TokenLoss:
    keep = ~(high | low)
    policy = -torch.where(keep, config.adv_tau * x.advantages * importance_ratio(x.log_ratio, keep), 0.0)
    return TokenLoss(policy + config.kl_tau * x.log_ratio**2, clip_metrics(low, high))


def grpo(x: LossInputs, config: GRPOLoss) -> TokenLoss:
    """GRPO: PPO's clipped surrogate per token (arXiv 2402.03300); clip-higher (arXiv 2503.14476) if the sides differ.

    loss = −min(r·A, clip(r, 1−clip_low, 1+clip_high)·A) + kl_tau · (log r)².
    """
    log_ratio = x.log_ratio
    policy, metrics = clipped_surrogate(
        importance_ratio(log_ratio), x.advantages, config.clip_low, config.clip_high
    )
    return TokenLoss(policy + config.kl_tau * log_ratio**2, metrics)


def gspo(x: LossInputs, config: GSPOLoss) -> TokenLoss:
    """GSPO: PPO's clipped surrogate on the length-normalized ratio of the full sequence (arXiv 2507.18071, eq. 13-14).

    s = exp(mean over the sequence's tokens of log r), and per token s_t = sg(s) · π_t / sg(π_t): every token has its
    sequence's ratio, and the gradient flows through its own log π. The step's loss is 1/S Σ_i 1/|y_i| Σ_t over its S
    sequences, which all have the same weight whatever their length. `step_loss` averages over a step's tokens
    (1/N Σ_t), so a token has the weight (N/S) / |y_i|.
    """
    log_ratio = x.log_ratio
    sequence = x.sequence_mean(log_ratio.detach())
    ratio = importance_ratio(sequence + x.logprobs - x.logprobs.detach())
    policy, metrics = clipped_surrogate(ratio, x.advantages, config.clip_low, config.clip_high)
    weight = x.mean_length / x.sequence_lengths
    return TokenLoss(weight * (policy + config.kl_tau * log_ratio**2), metrics)


def cispo(x: LossInputs, config: CISPOLoss) -> TokenLoss:
    """CISPO: the clipped ratio is a detached weight, so no token loses its gradient (arXiv 2506.13585, eq. 4-5).

    loss = −sg(clip(r, 1−clip_low, 1+clip_high)) · A · log π + kl_tau · (log r)².
    """
    log_ratio = x.log_ratio
    ratio = log_ratio.detach().exp()
    low, high = ratio < 1 - config.clip_low, ratio > 1 + config.clip_high
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    policy = -weight * x.advantages * x.logprobs
    metrics = {name.replace("masked", "clipped"): value for name, value in clip_metrics(low, high).items()}
    return TokenLoss(policy + config.kl_tau * log_ratio**2, metrics)


def ref_kl(x: LossInputs) -> TokenLoss:
    """Reverse KL to a reference policy on the student's own samples (on-policy distillation).

    The advantage of a token is sg(log π_ref − log π). Dropped if π − μ < −0.2.
    loss = −keep · sg(log π_ref − log π) · r + 1e-3 · (log r)². Not configurable, as in the source.
    """
    log_ratio = x.log_ratio
    with torch.no_grad():
        keep = x.logprobs.exp() - x.inference_logprobs.exp() >= -MASK_LOW
        advantages = x.ref_logprobs - x.logprobs
    policy = -torch.where(keep, advantages * importance_ratio(log_ratio, keep), 0.0)
    return TokenLoss(policy + KL_TAU * log_ratio**2)


LOSSES: dict[str, Callable[[LossInputs, Any], TokenLoss]] = {
    "dppo": dppo,
    "ipo": ipo,
    "grpo": grpo,
    "gspo": gspo,
    "cispo": cispo,
    "custom": custom,
}
"""``type`` of a recipe's block → its function."""
