"""GRPO: PPO's clipped surrogate per token (arXiv 2402.03300); clip-higher (arXiv 2503.14476) when the sides differ.

loss = −min(r·A, clip(r, 1−clip_low, 1+clip_high)·A) + kl_tau · (log r)².
"""

from __future__ import annotations

from primerl_hpc.recipe.training_schema import GRPOLoss
from primerl_hpc.trainer.losses.base import LossInputs, TokenLoss, clipped_surrogate


def grpo(x: LossInputs, config: GRPOLoss) -> TokenLoss:
    log_ratio = x.log_ratio
    policy, metrics = clipped_surrogate(log_ratio.exp(), x.advantages, config.clip_low, config.clip_high)
    return TokenLoss(policy + config.kl_tau * log_ratio**2, metrics)
