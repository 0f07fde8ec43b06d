"""IPO: like DPPO, but a token is dropped if |π − μ| > threshold, whatever the sign of its advantage."""

from __future__ import annotations

import torch

from primerl_hpc.recipe.schema.training import IPOLoss
from primerl_hpc.trainer.losses.base import LossInputs, TokenLoss, clip_metrics, importance_ratio


def ipo(x: LossInputs, config: IPOLoss) -> TokenLoss:
    log_ratio = x.log_ratio
    with torch.no_grad():
        delta = x.logprobs.exp() - x.inference_logprobs.exp()
        high, low = delta > config.threshold, delta < -config.threshold
    keep = ~(high | low)
    policy = -torch.where(keep, config.adv_tau * x.advantages * importance_ratio(log_ratio, keep), 0.0)
    return TokenLoss(policy + config.kl_tau * log_ratio**2, clip_metrics(low, high))


LOSS = ipo
