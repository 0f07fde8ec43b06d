"""Layers that carry state along a row (gated delta rule, Mamba2, short convolutions), computed sample by sample.

    run_by_sample(blocks)      # every such layer of the blocks starts each sample with an empty state

A packed row is cut at the borders of its samples, and samples of similar length become a batch with zeros behind each
sample: transformers' own module, with any kernel, computes them. Zeros behind a sample change nothing before them,
because the layers are causal. If ranks share rows, see `shared_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from primerl_hpc.trainer.batch import to_device
from primerl_hpc.trainer.model.recurrent.shared_rows import forward_shared
from primerl_hpc.trainer.parallel.context import Packing


@dataclass(frozen=True)
class SampleBatch:
    """Samples whose lengths differ by less than a factor of two."""

    tokens: Tensor  # [S, L] among the B·n tokens of the rows; behind a sample: its last token
    is_real: Tensor  # [S, L] bool
    places: Tensor  # [T] of the tokens among S·L; a mask would make the host wait for their number

    def cut(self, hidden: Tensor) -> Tensor:
        """[B·n, H] → [S, L, H]."""
        return hidden[self.tokens] * self.is_real[..., None]

    def kept(self, values: Tensor) -> Tensor:
        """[S, L, …] → [T, …], without what is behind samples."""
        return values.flatten(0, 1)[self.places]


def sample_batches(packing: Packing) -> list[SampleBatch]:
    """Return the samples of the rows in batches; every token is in one of them."""
    lengths = np.asarray(packing.sample_lengths())
    starts = np.cumsum(lengths) - lengths
    classes = np.ceil(np.log2(lengths)).astype(int)
    arrays = {}
    for number, size in enumerate(np.unique(classes)):
        chosen = classes == size
        places = np.arange(lengths[chosen].max())
        arrays[f"tokens.{number}"] = starts[chosen, None] + np.minimum(places, lengths[chosen, None] - 1)
        arrays[f"is_real.{number}"] = is_real = places < lengths[chosen, None]
        arrays[f"places.{number}"] = np.flatnonzero(is_real)
    moved = to_device(arrays, packing.positions.device)
    return [
        SampleBatch(moved[f"tokens.{number}"], moved[f"is_real.{number}"], moved[f"places.{number}"])
        for number in range(len(arrays) // 3)
    ]


def state_layer(block: nn.Module) -> nn.Module | None:
    """Return the child of a decoder's block that carries state. It is recognized by its convolution."""
    children = (
        child for child in block.children() if any(isinstance(part, nn.Conv1d) for part in child.children())
    )
    return next(children, None)


def run_by_sample(blocks: Sequence[nn.Module]) -> None:
    """Let the layers of ``blocks`` that carry state compute the samples of packed rows separately."""
    for block in blocks:
        if (layer := state_layer(block)) is not None:
            block.register_forward_pre_hook(partial(_keep_packing, layer), with_kwargs=True)
            layer.forward = partial(_forward, layer, layer.forward)


def _keep_packing(layer: nn.Module, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    layer.packing_of_block = kwargs["packing"]


@torch.compiler.disable
def _forward(
    layer: Any, own: Callable[..., Tensor], hidden_states: Tensor, *args: Any, **others: Any
) -> Tensor:
    """Return what ``own`` computes for [B, n, H], sample by sample. Its other arguments are caches and masks."""
    packing: Packing = layer.packing_of_block
    if hasattr(getattr(layer, "out_proj", None), "lora_A"):
        layer.training = (
            False  # a training kernel of Mamba2 multiplies by the projection's weight, without its adapter
        )
    if packing.context.size > 1:
        return forward_shared(layer, own, hidden_states, packing, forward_samples)
    return forward_samples(own, hidden_states, packing)


def forward_samples(own: Callable[..., Tensor], hidden: Tensor, packing: Packing) -> Tensor:
    """Apply ``own`` to the samples of full rows: [B, N, H] → [B, N, width of its output]."""
    batches = packing.once("sample batches", lambda: sample_batches(packing))
    rows = hidden.flatten(0, 1)
    outs = torch.cat([batch.kept(own(hidden_states=batch.cut(rows))) for batch in batches])
    tokens = torch.cat([batch.kept(batch.tokens) for batch in batches])
    return torch.empty_like(outs).index_copy(0, tokens, outs).unflatten(0, hidden.shape[:2])
