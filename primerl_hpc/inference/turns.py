"""An engine on accelerators that it shares with the trainer: when it starts, and how deeply it sleeps.

`wait_for_turn` blocks until the orchestrator admits this incarnation (`transport.turns`). Afterwards the engine sleeps
and wakes by requests to `routes`.
"""

from __future__ import annotations

import logging

from primerl_hpc.common import env
from primerl_hpc.common.waiting import Polling
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.turns import TurnRequest, read_grant, write_request

logger = logging.getLogger(__name__)

POLL_S = 0.1
KEEP_WEIGHTS, DROP_WEIGHTS = 1, 2
"""vLLM's levels of sleep: weights are copied to host memory, or dropped. Both drop the KV cache."""


def wait_for_turn(run: RunDir, process: str) -> None:
    """Block until this incarnation may use the accelerators. The supervisor limits the time (``ready_timeout_s``)."""
    request = TurnRequest(env.attempt(), env.incarnation())
    write_request(run, process, request)
    logger.info("waiting until the trainer's turn is over")
    for _ in Polling(None, POLL_S):
        grant = read_grant(run)
        if grant is not None and grant.admits_engine(process, request):
            return


def sleep_level(recipe: Recipe, *, is_stored_quantized: bool) -> int:
    """Return how deeply an engine sleeps.

    A weight update writes every parameter of a full model, so its weights are dropped: a copy in host memory would cost
    as much memory as the model, and two transfers at each turn. An update of adapters does not write the base model,
    and one of a quantized model not all scales: these keep a copy.
    """
    is_partial = recipe.lora is not None or recipe.inference.quantization is not None or is_stored_quantized
    return KEEP_WEIGHTS if is_partial else DROP_WEIGHTS
