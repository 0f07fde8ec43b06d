"""A step's loss: L = Σ L_rl/N_rl + Σ L_ce/N_ce + Σ L_ref_kl/N_ref_kl.

Each N is the number of the component's tokens over all ranks and micro-batches of the step (at least 1), so the
result does not depend on the distribution of tokens over rows and ranks. A token belongs to a component if its weight
is not zero; the weight multiplies its loss.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from primerl_hpc.recipe.schema.training import Loss
from primerl_hpc.trainer.batch import COMPONENTS, TokenBatch
from primerl_hpc.trainer.losses.custom import CustomLossError
from primerl_hpc.trainer.losses.inputs import MAX_LOG_RATIO, LossInputs, TokenLoss
from primerl_hpc.trainer.losses.policy_losses import LOSSES, ref_kl
from primerl_hpc.transport.rollouts.micro_batch import MicroBatch


def rl_loss(x: LossInputs, config: Loss) -> TokenLoss:
    """Compute the loss that the recipe's block selects."""
    return LOSSES[config.type](x, config)


def component_counts(rows: list[MicroBatch]) -> list[int]:
    """Return the number of trained tokens of rl, ce and ref_kl in ``rows``, and of samples with any of rl."""
    counts = [0] * (len(COMPONENTS) + 1)
    for row in rows:
        members = [(row.weights(name) != 0) & (row.position_ids != 0) for name in COMPONENTS]
        for number, is_member in enumerate(members):
            counts[number] += int(is_member.sum())
        counts[-1] += len(np.unique(row.sample_ids[members[0]]))
    return counts


def step_loss(
    batch: TokenBatch, logprobs: Tensor, counts: Tensor, config: Loss
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor | int]]]:
    """Return this forward's part of the step's loss (scalar), and metrics as (sum, number of tokens).

    ``logprobs`` [T] float32; ``counts`` [4]: `component_counts` summed over all ranks.
    """
    *num_tokens, num_sequences = counts
    total = logprobs.sum() * 0.0  # keeps the graph connected when no token is trained here
    metrics: dict[str, tuple[Tensor, Tensor | int]] = {}
    for name, count in zip(COMPONENTS, num_tokens, strict=True):
        weights, members = getattr(batch, f"{name}_weights"), batch.members[name]
        if not len(members):
            continue
        x = LossInputs(
            logprobs=logprobs[members],
            inference_logprobs=batch.inference_logprobs[members],
            advantages=batch.advantages[members],
            ref_logprobs=batch.ref_logprobs[members],
            sequence_ids=batch.sequence_ids[members],
            num_sequences=batch.num_sequences,
            mean_length=counts[0] / num_sequences.clamp(min=1),
        )
        if name == "ce":
            result = TokenLoss(-x.logprobs)
        else:
            result = ref_kl(x) if name == "ref_kl" else rl_loss(x, config)
        part = (result.loss * weights[members]).sum()
        total = total + part / count.clamp(min=1)
        # for ce report the negative log-likelihood itself, whatever its weight
        metrics[f"loss/{name}"] = (
            result.loss.sum().detach() if name == "ce" else part.detach(),
            len(members),
        )
        metrics |= metric_sums(x, result)
    return total, metrics


@torch.no_grad()
def metric_sums(x: LossInputs, result: TokenLoss) -> dict[str, tuple[Tensor, Tensor | int]]:
    """Return (sum, number of tokens) of each metric; with masked tokens also figures for either side of the mask."""
    sums: dict[str, tuple[Tensor, Tensor | int]] = {
        f"{name}/mean": (value.sum(), len(value)) for name, value in result.metrics.items()
    }
    if (masked := result.metrics.get("is_masked")) is None:
        return sums
    kl = mismatch_kl(x.logprobs, x.inference_logprobs)
    for name, value, members in (
        ("masked_mismatch_kl", kl, masked),
        ("unmasked_mismatch_kl", kl, 1 - masked),
        ("masked_advantage_positive", x.advantages > 0, masked),
        ("masked_advantage_negative", x.advantages < 0, masked),
    ):
        sums[f"{name}/mean"] = (torch.where(members > 0, value, 0.0).sum(), members.sum())
    return sums


def try_loss(config: Loss) -> tuple[str, ...]:
    """Evaluate the loss on four synthetic tokens of two samples and return the names of its metrics.

    Raises ConfigError or CustomLossError for a custom loss that cannot be used.
    """
    x = LossInputs(
        logprobs=torch.tensor([-0.1, -0.7, -1.2, -2.0], requires_grad=True),
        inference_logprobs=torch.tensor([-0.2, -0.6, -1.2, -2.5]),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        ref_logprobs=torch.full((4,), -1.0),
        sequence_ids=torch.tensor([0, 0, 1, 1]),
        num_sequences=2,
        mean_length=2.0,
    )
    result = rl_loss(x, config)
    if not result.loss.requires_grad:
        raise CustomLossError(
            "the loss does not depend on x.logprobs (no gradient)", location="loss.import_path"
        )
    return tuple(metric_sums(x, result))


def mismatch_kl(logprobs: Tensor, inference_logprobs: Tensor) -> Tensor:
    """Return the k3 estimator of KL(μ‖π) per token: r − log r − 1 with r = π/μ, r at most e^`MAX_LOG_RATIO`."""
    log_ratio = logprobs - inference_logprobs
    return torch.expm1(log_ratio.clamp(max=MAX_LOG_RATIO)) - log_ratio
