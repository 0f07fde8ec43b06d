"""IPO: like DPPO, but a token is dropped if |π − μ| > threshold, whatever its advantage's sign."""

from __future__ import annotations

import torch

from primerl_hpc.recipe.training_schema import IPOLoss
from primerl_hpc.trainer.losses.base import LossInputs, TokenLoss, clip_metrics


def ipo(x: LossInputs, config: IPOLoss) -> TokenLoss:
    log_ratio = x.log_ratio
    with torch.no_grad():
        delta = x.logprobs.exp() - x.inference_logprobs.exp()
        high, low = delta > config.threshold, delta < -config.threshold
    policy = -torch.where(high | low, 0.0, config.adv_tau * x.advantages * log_ratio.exp())
    return TokenLoss(policy + config.kl_tau * log_ratio**2, clip_metrics(low, high))
