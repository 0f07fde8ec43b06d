"""CISPO: the clipped ratio is a detached weight, so no token loses its gradient (arXiv 2506.13585, eq. 4-5).

loss = −sg(clip(r, 1−clip_low, 1+clip_high)) · A · log π + kl_tau · (log r)².
"""

from __future__ import annotations

from primerl_hpc.recipe.schema.training import CISPOLoss
from primerl_hpc.trainer.losses.base import LossInputs, TokenLoss, clip_metrics


def cispo(x: LossInputs, config: CISPOLoss) -> TokenLoss:
    log_ratio = x.log_ratio
    ratio = log_ratio.detach().exp()
    low, high = ratio < 1 - config.clip_low, ratio > 1 + config.clip_high
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    policy = -weight * x.advantages * x.logprobs
    metrics = {name.replace("masked", "clipped"): value for name, value in clip_metrics(low, high).items()}
    return TokenLoss(policy + config.kl_tau * log_ratio**2, metrics)


LOSS = cispo
