"""DPPO: policy gradient with a trust region on the probability difference Δp = π − μ (binary total variation).

A token is dropped if (A > 0 and Δp > mask_high) or (A ≤ 0 and Δp < −mask_low).
loss = −keep · (adv_tau·A) · r + kl_tau · (log r)²; the second term applies to every token, dropped or not.
"""

from __future__ import annotations

import torch

from primerl_hpc.recipe.schema.training import DPPOLoss
from primerl_hpc.trainer.losses.base import LossInputs, TokenLoss, clip_metrics, importance_ratio


def dppo(x: LossInputs, config: DPPOLoss) -> TokenLoss:
    log_ratio = x.log_ratio
    with torch.no_grad():
        delta = x.logprobs.exp() - x.inference_logprobs.exp()
        high = (x.advantages > 0) & (delta > config.mask_high)
        low = (x.advantages <= 0) & (delta < -config.mask_low)
    keep = ~(high | low)
    policy = -torch.where(keep, config.adv_tau * x.advantages * importance_ratio(log_ratio, keep), 0.0)
    return TokenLoss(policy + config.kl_tau * log_ratio**2, clip_metrics(low, high))


LOSS = dppo
