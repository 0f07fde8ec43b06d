"""GSPO: PPO's clipped surrogate on the length-normalized ratio of the full sequence (arXiv 2507.18071, eq. 13-14).

s = exp(mean over the sequence's tokens of log r), and per token s_t = sg(s) · π_t / sg(π_t): every token has its
sequence's ratio, and the gradient flows through its own log π. The step's loss is 1/S Σ_i 1/|y_i| Σ_t over its S
sequences, which all have the same weight whatever their length. `components` averages over a step's tokens (1/N Σ_t),
so a token has the weight (N/S) / |y_i|.
"""

from __future__ import annotations

from primerl_hpc.recipe.schema.training import GSPOLoss
from primerl_hpc.trainer.losses.base import LossInputs, TokenLoss, clipped_surrogate, importance_ratio


def gspo(x: LossInputs, config: GSPOLoss) -> TokenLoss:
    log_ratio = x.log_ratio
    sequence = x.sequence_mean(log_ratio.detach())
    ratio = importance_ratio(sequence + x.logprobs - x.logprobs.detach())
    policy, metrics = clipped_surrogate(ratio, x.advantages, config.clip_low, config.clip_high)
    weight = x.mean_length / x.sequence_lengths
    return TokenLoss(weight * (policy + config.kl_tau * log_ratio**2), metrics)


LOSS = gspo
