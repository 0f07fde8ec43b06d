"""Losses on per-token streams: one file per loss, `components` adds them up.

Reading order: base (what a loss gets and gives) → dppo → ipo → grpo → gspo → cispo → custom → ref_kl → components.
Notation: π trainer and μ inference probability of the sampled token, r = π/μ, A advantage.
"""

from primerl_hpc.trainer.losses.base import LossInputs, TokenLoss
from primerl_hpc.trainer.losses.components import COMPONENTS, component_counts, step_loss, try_loss
from primerl_hpc.trainer.losses.registry import rl_loss

__all__ = ["COMPONENTS", "LossInputs", "TokenLoss", "component_counts", "rl_loss", "step_loss", "try_loss"]
