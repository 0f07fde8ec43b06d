"""The loss of the tiny recipe, which waits in a turn of a colocated trainer until a test has acted (see `hold`).

A user's module: a run imports it from a folder on PYTHONPATH.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.recipe.schema.training import DPPOLoss
from primerl_hpc.trainer.losses.inputs import LossInputs, TokenLoss
from primerl_hpc.trainer.losses.policy_losses import dppo

CONFIG = DPPOLoss(mask_low=0.2, mask_high=0.2, kl_tau=0.001)
POLL_S = 0.05


def is_held() -> bool:
    try:
        first = int(Path(os.environ["HOLD_TURN_FILE"]).read_text())
    except FileNotFoundError:
        return False
    return read_json_or_none(Path(os.environ["HOLD_TURN_REQUEST"]))["number"] >= first


def held_dppo(x: LossInputs) -> TokenLoss:
    while is_held():
        time.sleep(POLL_S)
    return dppo(x, CONFIG)
