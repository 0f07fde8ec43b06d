"""Losses on per-token streams: one file per loss, `components` adds them up.

Reading order: base (inputs and outputs of a loss) → dppo → ipo → grpo → gspo → cispo → custom → ref_kl → components.
To add a loss, write a file named like its ``type`` that ends in ``LOSS = <its function>``, and a block in
``recipe/schema/training.py``.
Notation: π trainer and μ inference probability of the sampled token, r = π/μ, A advantage.
"""

from primerl_hpc.trainer.losses.base import LossInputs, TokenLoss
from primerl_hpc.trainer.losses.components import COMPONENTS, component_counts, rl_loss, step_loss, try_loss

__all__ = ["COMPONENTS", "LossInputs", "TokenLoss", "component_counts", "rl_loss", "step_loss", "try_loss"]
