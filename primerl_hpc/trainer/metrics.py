"""Sums that all ranks add up once a step: one all-reduce for every metric of the step.

A metric is a sum and the number of tokens it was summed over; what is reported is the mean over all of them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from primerl_hpc.trainer.batch import TokenBatch
from primerl_hpc.trainer.losses.components import mismatch_kl


class Tally:
    """Names must be the same on all ranks after each step; those seen on one rank only count as 0 elsewhere."""

    def __init__(self, names: list[str], device: torch.device, *, is_counted: bool = True) -> None:
        """``is_counted`` is false on ranks whose tokens another rank counts already."""
        self.names, self.is_counted = names, is_counted
        self.index = {name: position for position, name in enumerate(names)}
        self.values = torch.zeros(len(names), 2, dtype=torch.float64, device=device)

    def add(self, name: str, total: Tensor, count: Tensor | int) -> None:
        row = self.values[self.index[name]]
        row[0] += total
        row[1] += count

    def reduce(self) -> dict[str, tuple[float, float]]:
        """(sum, count) per name over all ranks. Collective."""
        self.values *= self.is_counted
        dist.all_reduce(self.values)
        return {
            name: (total, count)
            for name, (total, count) in zip(self.names, self.values.tolist(), strict=True)
        }


def metric_names(env_names: list[str]) -> list[str]:
    groups = ["all", *env_names]
    return [
        "loss/total",
        "loss/nan_count",
        *(f"loss/{component}" for component in ("rl", "ce", "ref_kl")),
        *(f"entropy/{group}/mean" for group in groups),
        *(f"mismatch_kl/{group}/mean" for group in groups),
    ]


@torch.no_grad()
def tally_tokens(
    tally: Tally, batch: TokenBatch, logprobs: Tensor, entropies: Tensor, env_names: list[str]
) -> None:
    """Entropy over all trained tokens; mismatch KL over those the policy sampled (the loss mask). Per environment too."""
    kl = torch.where(batch.loss_mask, mismatch_kl(logprobs, batch.inference_logprobs), 0.0)
    mask = batch.loss_mask
    tally.add("entropy/all/mean", entropies.sum(), len(entropies))
    tally.add("mismatch_kl/all/mean", kl.sum(), mask.sum())
    if not env_names:
        return
    for index, name in enumerate(env_names):
        members = batch.env_ids == index
        tally.add(f"entropy/{name}/mean", entropies[members].sum(), members.sum())
        tally.add(f"mismatch_kl/{name}/mean", kl[members].sum(), (mask & members).sum())


def means(reduced: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Reported metrics: means over their tokens, without those that no token took part in.

    ``loss/ce`` is the negative log-likelihood of distilled and demonstrated tokens, ``kl_ent_ratio`` mismatch KL over entropy.
    """
    hidden = ("loss/total", "loss/rl", "loss/nan_count")
    found = {name: total / count for name, (total, count) in reduced.items() if count and name not in hidden}
    if "mismatch_kl/all/mean" in found and found["entropy/all/mean"]:
        found["kl_ent_ratio"] = found["mismatch_kl/all/mean"] / found["entropy/all/mean"]
    return found
