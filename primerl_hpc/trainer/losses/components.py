"""A step's loss: L = Σ L_rl/N_rl + Σ L_ce/N_ce + Σ L_ref_kl/N_ref_kl.

Each N is the number of the component's tokens over all ranks and micro-batches of the step (at least 1), so the
result does not depend on how tokens are spread over rows and ranks. A token belongs to a component where its weight
is not zero; the weight multiplies its loss.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from primerl_hpc.recipe.training_schema import Loss
from primerl_hpc.trainer.batch import TokenBatch
from primerl_hpc.trainer.losses.base import LossInputs
from primerl_hpc.trainer.losses.ref_kl import ref_kl
from primerl_hpc.trainer.losses.registry import rl_loss
from primerl_hpc.transport.rollouts import MicroBatch

COMPONENTS = ("rl", "ce", "ref_kl")


def component_counts(rows: list[MicroBatch]) -> list[int]:
    """Trained tokens of rl, ce and ref_kl in ``rows``."""
    return [
        sum(int(np.count_nonzero(getattr(row, f"{name}_weights")[row.position_ids != 0])) for row in rows)
        for name in COMPONENTS
    ]


def step_loss(
    batch: TokenBatch, logprobs: Tensor, counts: Tensor, config: Loss
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor | int]]]:
    """This forward's part of the step's loss (scalar), and metrics as (sum, number of tokens).

    ``logprobs`` [T] float32; ``counts`` [3] global token counts in the order of `COMPONENTS`.
    """
    total = logprobs.sum() * 0.0  # keeps the graph whole when no token is trained here
    metrics: dict[str, tuple[Tensor, Tensor | int]] = {}
    for name, count in zip(COMPONENTS, counts, strict=True):
        weights = getattr(batch, f"{name}_weights")
        members = weights.nonzero()[:, 0]
        x = LossInputs(
            logprobs=logprobs[members],
            inference_logprobs=batch.inference_logprobs[members],
            advantages=batch.advantages[members],
            ref_logprobs=batch.ref_logprobs[members],
            sequence_ids=batch.sequence_ids[members],
            num_sequences=batch.num_sequences,
        )
        if name == "ce":
            losses, extra = -x.logprobs, {}
        else:
            result = ref_kl(x) if name == "ref_kl" else rl_loss(x, config)
            losses, extra = result.loss, result.metrics
        part = (losses * weights[members]).sum()
        total = total + part / count.clamp(min=1)
        metrics[f"loss/{name}"] = (part.detach(), len(members))
        metrics |= {f"{key}/mean": (value.sum(), len(members)) for key, value in extra.items()}
    return total, metrics


def mismatch_kl(logprobs: Tensor, inference_logprobs: Tensor) -> Tensor:
    """k3 estimator of KL(μ‖π) per token: r − log r − 1 with r = π/μ."""
    log_ratio = logprobs - inference_logprobs
    return torch.expm1(log_ratio) - log_ratio
