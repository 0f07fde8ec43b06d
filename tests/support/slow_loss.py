"""The loss of the tiny recipe in a trainer that is slower than the engines.

A user's module: a run imports it from a folder on PYTHONPATH.
"""

from __future__ import annotations

import time

from primerl_hpc.recipe.schema.training import DPPOLoss
from primerl_hpc.trainer.losses.inputs import LossInputs, TokenLoss
from primerl_hpc.trainer.losses.policy_losses import dppo

CONFIG = DPPOLoss(mask_low=0.2, mask_high=0.2, kl_tau=0.001)
DURATION_S = 2.0


def slow_dppo(x: LossInputs) -> TokenLoss:
    time.sleep(DURATION_S)
    return dppo(x, CONFIG)
