"""Sequence parallelism: outside of divided matrices, each rank of ``tensor`` has a contiguous part of the tokens.

Norms, routers, experts and residual sums work on these parts. Divided matrices need all tokens: they are gathered
before the first matrix, and the products of the last one are summed and scattered again. Each operation is the other's
gradient, so that every gradient is a part of a sum over ranks, as with all other axes.

    gather_tokens    [..., n / size, H] → [..., n, H]
    scatter_tokens   [..., n, H] of each rank → the sum over ranks, [..., n / size, H]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that divide matrices. ``group`` is None for a single rank."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def part_of(self, count: int) -> slice:
        """Return this rank's part of ``count`` rows: equal parts, the last ones shorter, as torch shards tensors."""
        width = -(-count // self.size)
        return slice(min(self.rank * width, count), min((self.rank + 1) * width, count))


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, ranks):
        ctx.ranks = ranks
        return gathered(hidden, ranks)

    @staticmethod
    def backward(ctx, grad):
        return scattered_sum(grad, ctx.ranks), None


class ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, ranks):
        ctx.ranks = ranks
        return scattered_sum(hidden, ranks)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad, ctx.ranks), None


def _gather(hidden: Tensor, ranks: TensorGroup) -> Tensor:
    return GatherTokens.apply(hidden, ranks)


def _scatter(hidden: Tensor, ranks: TensorGroup) -> Tensor:
    return ScatterTokens.apply(hidden, ranks)


TokensFunction = Callable[[Tensor, TensorGroup], Tensor]
# compiled code calls them between graphs
gather_tokens = cast(TokensFunction, torch.compiler.disable(_gather))
scatter_tokens = cast(TokensFunction, torch.compiler.disable(_scatter))


def gathered(hidden: Tensor, ranks: TensorGroup) -> Tensor:
    out = hidden.new_empty(ranks.size, *hidden.shape)
    dist.all_gather_single(out.view(-1), hidden.contiguous().view(-1), group=ranks.group)
    return out.movedim(0, -3).flatten(-3, -2)


def scattered_sum(hidden: Tensor, ranks: TensorGroup) -> Tensor:
    parts = hidden.unflatten(-2, (ranks.size, -1)).movedim(-3, 0).contiguous()
    out = hidden.new_empty(parts.shape[1:])
    dist.reduce_scatter_single(out.view(-1), parts.view(-1), group=ranks.group)
    return out
