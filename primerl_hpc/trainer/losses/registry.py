"""Which function a recipe's loss block means."""

from __future__ import annotations

from primerl_hpc.recipe.training_schema import Loss
from primerl_hpc.trainer.losses.base import LossInputs, TokenLoss
from primerl_hpc.trainer.losses.cispo import cispo
from primerl_hpc.trainer.losses.custom import custom
from primerl_hpc.trainer.losses.dppo import dppo
from primerl_hpc.trainer.losses.grpo import grpo
from primerl_hpc.trainer.losses.gspo import gspo
from primerl_hpc.trainer.losses.ipo import ipo

LOSSES = {"dppo": dppo, "ipo": ipo, "grpo": grpo, "gspo": gspo, "cispo": cispo, "custom": custom}


def rl_loss(x: LossInputs, config: Loss) -> TokenLoss:
    return LOSSES[config.type](x, config)
