"""GRPO: PPO's clipped surrogate per token (arXiv 2402.03300); clip-higher (arXiv 2503.14476) if the sides differ.

loss = −min(r·A, clip(r, 1−clip_low, 1+clip_high)·A) + kl_tau · (log r)².
"""

from __future__ import annotations

from primerl_hpc.recipe.schema.training import GRPOLoss
from primerl_hpc.trainer.losses.base import LossInputs, TokenLoss, clipped_surrogate, importance_ratio


def grpo(x: LossInputs, config: GRPOLoss) -> TokenLoss:
    log_ratio = x.log_ratio
    policy, metrics = clipped_surrogate(
        importance_ratio(log_ratio), x.advantages, config.clip_low, config.clip_high
    )
    return TokenLoss(policy + config.kl_tau * log_ratio**2, metrics)


LOSS = grpo
