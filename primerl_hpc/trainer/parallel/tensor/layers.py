"""Divided layers: a rank computes some outputs of a linear layer, or its product with some inputs, or some rows of the
embedding table.

    columns    y = x W_rᵀ           rows of W: some heads or features; x has all tokens
    rows       y = Σ_r x_r W_rᵀ     columns of W: the sum is scattered over tokens
    table      rows of the embedding table; the sum is scattered over tokens

The class of a transformers module is replaced, so that names and parameters stay the same. A divided weight is a
DTensor sharded over ``tensor``. Other parameters (biases, adapters, keys of fewer heads than ranks) are full on every
rank, which uses its part: its gradient is zero elsewhere, and FSDP sums it over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import new_class
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from primerl_hpc.trainer.fp8.products import linear
from primerl_hpc.trainer.parallel.tensor.tokens import TensorGroup, gather_tokens, scatter_tokens


@dataclass(frozen=True)
class Division:
    """This rank's part of a dim: ``ranges`` of the full dim, one after another."""

    ranks: TensorGroup
    ranges: tuple[slice, ...]

    @property
    def size(self) -> int:
        """Rows or columns of the part."""
        return sum(part.stop - part.start for part in self.ranges)

    def take(self, value: Tensor, dim: int) -> Tensor:
        if isinstance(value, DTensor):
            return value.to_local()
        parts = [value.narrow(dim, part.start, part.stop - part.start) for part in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class DividedLinear(nn.Linear):
    """Declarations only: what the two kinds of divided linear layers have."""

    division: Division
    lora_A: nn.Parameter  # [rank, in], if the layer has an adapter
    lora_B: nn.Parameter  # [out, rank]
    lora_scale: float
    lora_dropout: float

    def has_adapter(self) -> bool:
        return hasattr(self, "lora_A")

    def own_shape(self) -> tuple[int, int]:
        """Return the rows and columns that this rank multiplies."""
        raise NotImplementedError


class ColumnLinear(DividedLinear):
    def own_shape(self) -> tuple[int, int]:
        return self.division.size, self.in_features

    def forward(self, x: Tensor) -> Tensor:
        take = self.division.take
        out = linear(self, x, take(self.weight, 0), None if self.bias is None else take(self.bias, 0))
        if self.has_adapter():
            low = F.linear(F.dropout(x, self.lora_dropout, self.training), self.lora_A)
            out = out + self.lora_scale * F.linear(low, take(self.lora_B, 0))
        return out


class RowLinear(DividedLinear):
    def own_shape(self) -> tuple[int, int]:
        return self.out_features, self.division.size

    def forward(self, x: Tensor) -> Tensor:
        take = self.division.take
        out = linear(self, x, take(self.weight, 1))
        if self.has_adapter():
            low = F.linear(F.dropout(x, self.lora_dropout, self.training), take(self.lora_A, 1))
            out = out + self.lora_scale * F.linear(low, self.lora_B)
        out = scatter_tokens(out, self.division.ranks)
        return out if self.bias is None else out + self.bias


class DividedEmbedding(nn.Embedding):
    division: Division

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings [B, n / size, H] of this rank's tokens of ids [B, n]."""
        (part,) = self.division.ranges
        weight = self.division.take(self.weight, 0)
        local = ids - part.start
        is_own = (local >= 0) & (local < len(weight))
        padding = None if self.padding_idx is None else self.padding_idx - part.start
        if padding is not None and not 0 <= padding < len(weight):
            padding = None
        found = F.embedding(local.clamp(0, len(weight) - 1), weight, padding)
        return scatter_tokens(found * is_own[..., None], self.division.ranks)


def divided_embedding_class(own: type[nn.Embedding]) -> type[nn.Embedding]:
    """Return the class for an embedding of class ``own``: a family's subclass calls `DividedEmbedding` as its base."""
    if own is nn.Embedding:
        return DividedEmbedding
    return new_class(f"Divided{own.__name__}", (own, DividedEmbedding))


def gather_input(
    ranks: TensorGroup, module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict]:
    """Gather the tokens of a module's hidden states: a forward pre-hook of attention and MLPs."""
    if args:
        return (gather_tokens(args[0], ranks), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": gather_tokens(kwargs["hidden_states"], ranks)}
