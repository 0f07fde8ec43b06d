"""Metrics over all ranks: one all-reduce for the sums of a step and one for its maxima.

A metric is a sum and the number of tokens in it; the reported value is the mean over all of them.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from primerl_hpc.trainer.batch import COMPONENTS, TokenBatch
from primerl_hpc.trainer.losses.step_loss import mismatch_kl

ZERO_GRADIENTS = "optim/zero_grad_ratio"
_SQUARE = "/square"  # end of the name of a sum of squares, from which `means` derives the standard deviation


class MetricSums:
    """Sums and counts by name. All ranks have the same names; names without an addition count as 0.

    Names that end in ``/max`` are maxima instead; `reduce` returns those that have a value with a count of 1.
    """

    def __init__(self, names: list[str], device: torch.device, *, is_counted: bool = True) -> None:
        """``is_counted``: False on ranks whose tokens another rank counts."""
        self.names = [name for name in names if not name.endswith("/max")]
        self.is_counted = is_counted
        self.index = {name: position for position, name in enumerate(self.names)}
        self.values = torch.zeros(len(self.names), 2, dtype=torch.float64, device=device)
        self.maxima = {
            name: torch.full((), -math.inf, dtype=torch.float64, device=device)
            for name in names
            if name.endswith("/max")
        }

    def add(self, name: str, total: Tensor, count: Tensor | int) -> None:
        row = self.values[self.index[name]]
        row[0] += total
        row[1] += count

    def add_maximum(self, name: str, value: Tensor) -> None:
        self.maxima[name] = torch.maximum(self.maxima[name], value.double())

    def reduce(self, gradients: Tensor | None = None) -> dict[str, tuple[float, float]]:
        """Return (sum, count) per name over all ranks. Collective.

        ``gradients``: this rank's `zero_gradients`, which every rank counts.
        """
        self.values *= self.is_counted
        if gradients is not None:
            self.values[self.index[ZERO_GRADIENTS]] = gradients.to(self.values.device)
        dist.all_reduce(self.values)
        found = {
            name: (total, count)
            for name, (total, count) in zip(self.names, self.values.tolist(), strict=True)
        }
        if self.maxima:
            maxima = torch.stack(list(self.maxima.values()))
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
            pairs = zip(self.maxima, maxima.tolist(), strict=True)
            found |= {name: (value, 1.0) for name, value in pairs if value != -math.inf}
        return found


def metric_names(env_names: list[str]) -> list[str]:
    groups = ["all", *env_names]
    return [
        "loss/total",
        "loss/nan_count",
        *(f"loss/{component}" for component in COMPONENTS),
        *(f"entropy/{group}/mean" for group in groups),
        *(f"mismatch_kl/{group}{end}" for group in groups for end in ("/mean", _SQUARE, "/max")),
        ZERO_GRADIENTS,
    ]


@torch.no_grad()
def add_token_metrics(
    sums: MetricSums, batch: TokenBatch, logprobs: Tensor, entropies: Tensor, env_names: list[str]
) -> None:
    """Add entropy of trained tokens and mismatch KL of sampled ones (the loss mask), in total and by environment."""
    if not len(entropies):
        return
    mask = batch.loss_mask
    kl = torch.where(mask, mismatch_kl(logprobs, batch.inference_logprobs), 0.0).double()
    values = torch.stack([entropies.double(), torch.ones_like(kl), kl, kl.square(), mask.double()], 1)
    sampled = torch.where(mask, kl, -math.inf)
    _add_group(sums, "all", values.sum(0), sampled.max())
    if not env_names:
        return
    by_env = values.new_zeros(len(env_names), values.shape[1]).index_add_(0, batch.env_ids, values)
    maxima = sampled.new_full((len(env_names),), -math.inf).scatter_reduce_(0, batch.env_ids, sampled, "amax")
    for name, row, maximum in zip(env_names, by_env, maxima, strict=True):
        _add_group(sums, name, row, maximum)


def _add_group(sums: MetricSums, group: str, row: Tensor, maximum: Tensor) -> None:
    """Add ``row`` [5]: sums of entropy, tokens, mismatch KL, its square, and sampled tokens."""
    entropy, num_tokens, mismatch, square, num_sampled = row
    sums.add(f"entropy/{group}/mean", entropy, num_tokens)
    sums.add(f"mismatch_kl/{group}/mean", mismatch, num_sampled)
    sums.add(f"mismatch_kl/{group}{_SQUARE}", square, num_sampled)
    sums.add_maximum(f"mismatch_kl/{group}/max", maximum)


def means(reduced: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Return the reported metrics: means over their tokens, without metrics that have no tokens.

    ``loss/ce`` is the negative log-likelihood of distilled and demonstrated tokens, whatever their weight in the loss;
    ``kl_ent_ratio`` is mismatch KL over entropy; ``…/std`` is the standard deviation over tokens.
    """
    hidden = ("loss/total", "loss/rl", "loss/nan_count")
    found = {name: total / count for name, (total, count) in reduced.items() if count and name not in hidden}
    for name in [name for name in found if name.endswith(_SQUARE)]:
        stem, square = name.removesuffix(_SQUARE), found.pop(name)
        found[f"{stem}/std"] = math.sqrt(max(0.0, square - found[f"{stem}/mean"] ** 2))
    if "mismatch_kl/all/mean" in found and found["entropy/all/mean"]:
        found["kl_ent_ratio"] = found["mismatch_kl/all/mean"] / found["entropy/all/mean"]
    return found
