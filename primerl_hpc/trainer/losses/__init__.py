"""Losses on per-token streams.

Reading order: inputs (of all losses, and what they return) → custom → policy_losses → step_loss, which adds them up.
"""

from primerl_hpc.trainer.losses.inputs import LossInputs, TokenLoss
from primerl_hpc.trainer.losses.step_loss import COMPONENTS, component_counts, rl_loss, step_loss, try_loss

__all__ = ["COMPONENTS", "LossInputs", "TokenLoss", "component_counts", "rl_loss", "step_loss", "try_loss"]
