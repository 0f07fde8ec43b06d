"""Reverse KL to a reference policy on the student's own samples (on-policy distillation).

The advantage of a token is sg(log π_ref − log π). Dropped if π − μ < −0.2.
loss = −keep · sg(log π_ref − log π) · r + 1e-3 · (log r)². Not configurable, as in the source.
"""

from __future__ import annotations

import torch

from primerl_hpc.trainer.losses.base import LossInputs, TokenLoss, importance_ratio

MASK_LOW, KL_TAU = 0.2, 1e-3


def ref_kl(x: LossInputs) -> TokenLoss:
    log_ratio = x.log_ratio
    with torch.no_grad():
        keep = x.logprobs.exp() - x.inference_logprobs.exp() >= -MASK_LOW
        advantages = x.ref_logprobs - x.logprobs
    policy = -torch.where(keep, advantages * importance_ratio(log_ratio, keep), 0.0)
    return TokenLoss(policy + KL_TAU * log_ratio**2)
