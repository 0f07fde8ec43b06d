"""Layers that carry state along a row whose tokens are divided among R ranks (context parallelism).

A state depends on all earlier tokens of its sample, so a rank computes 1/R of a layer's heads for all tokens of a row:

    own tokens    input projections
    all-to-all    n tokens of all heads → all N tokens of some heads, in the row's order
    all tokens    convolution and recurrence of these heads, sample by sample, by transformers' own code
    all-to-all    → n tokens of all heads
    own tokens    output projection; in Mamba2 also the gated norm, which may be over all heads

If the heads cannot be divided, every rank gathers the row, computes the complete layer, and keeps its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primerl_hpc.trainer.batch import to_device
from primerl_hpc.trainer.parallel.context import Context, Packing
from primerl_hpc.trainer.parallel.dispatch import AllToAll
from primerl_hpc.trainer.parallel.tensor.tokens import TensorGroup, gather_tokens

SampleBySample = Callable[[Callable[..., Tensor], Tensor, Packing], Tensor]
"""`by_sample.forward_samples`: apply a layer's forward to the samples of full rows."""


@dataclass(frozen=True)
class HeadPart:
    """Consecutive channels of a tensor: ``count`` heads or groups of ``width`` channels."""

    count: int
    width: int = 1
    is_shared: bool = False
    """Groups that several heads read. Ranks that hold heads of the same group each get a copy of it."""

    def divides(self, size: int) -> bool:
        return self.count % size == 0 or (self.is_shared and size % self.count == 0)

    def of(self, rank: int, size: int) -> range:
        """Return the channels of ``rank``."""
        each = max(1, self.count // size)
        first = rank * self.count // size
        return range(first * self.width, (first + each) * self.width)


HeadParts = tuple[HeadPart, ...]


@dataclass(frozen=True)
class Heads:
    """How the tensors of a layer consist of heads."""

    inputs: dict[str, HeadParts]
    """Output channels of each input projection."""
    convolution: str
    """Name of the convolution, of one filter for each channel."""
    channels: HeadParts
    """Channels of the convolution."""
    output: HeadPart
    """Channels before the output projection."""
    per_head: tuple[str, ...] = ()
    """Parameters with one value for each head of `output`."""
    counts: dict[str, HeadParts] = field(default_factory=dict)
    """The parts that each count of the layer counts: an attribute is their number of channels."""
    has_outer_norm: bool = False
    """True if the first part of the input only gates a norm before the output projection: both stay on own tokens."""

    def parts(self) -> HeadParts:
        """Return what ranks exchange, in the order of `inputs`."""
        parts = tuple(part for name in self.inputs for part in self.inputs[name])
        return parts[1:] if self.has_outer_norm else parts

    def divide(self, size: int) -> bool:
        return all(part.divides(size) for part in (*self.parts(), *self.channels, self.output))


def channels_of(parts: HeadParts, rank: int, size: int) -> list[int]:
    """Return the channels of ``rank`` in a tensor of ``parts``."""
    found, start = [], 0
    for part in parts:
        found += [start + channel for channel in part.of(rank, size)]
        start += part.count * part.width
    return found


def num_channels(parts: HeadParts, rank: int, size: int) -> int:
    return sum(len(part.of(rank, size)) for part in parts)


# -- families --------------------------------------------------------------------------------------


def heads_of(layer: Any) -> Heads:
    """Return how ``layer`` consists of heads: a gated delta rule, Mamba2, or a short convolution."""
    if hasattr(layer, "in_proj_qkvz"):
        return _delta_heads(layer, _fused_inputs(layer))
    if hasattr(layer, "in_proj_qkv"):
        return _delta_heads(layer, _separate_inputs(layer))
    if hasattr(layer, "ssm_state_size"):
        return _mamba_heads(layer)
    channel = HeadPart(layer.conv.in_channels)  # LFM2
    return Heads({"in_proj": (channel,) * 3}, "conv", (channel,), channel)


def _keys(layer: Any) -> HeadPart:
    return HeadPart(layer.num_k_heads, layer.head_k_dim, is_shared=True)


def _values(layer: Any) -> HeadPart:
    return HeadPart(layer.num_v_heads, layer.head_v_dim)


def _separate_inputs(layer: Any) -> dict[str, HeadParts]:
    """Return the input projections of Qwen3.5."""
    per_head = (HeadPart(layer.num_v_heads),)
    return {
        "in_proj_qkv": (_keys(layer), _keys(layer), _values(layer)),
        "in_proj_z": (_values(layer),),
        "in_proj_b": per_head,
        "in_proj_a": per_head,
    }


def _fused_inputs(layer: Any) -> dict[str, HeadParts]:
    """Return those of Qwen3-Next: a block for each head of keys, with the heads of values that use it."""
    values = layer.num_v_heads // layer.num_k_heads
    widths = {
        "in_proj_qkvz": 2 * layer.head_k_dim + 2 * values * layer.head_v_dim,
        "in_proj_ba": 2 * values,
    }
    return {name: (HeadPart(layer.num_k_heads, width),) for name, width in widths.items()}


def _delta_heads(layer: Any, inputs: dict[str, HeadParts]) -> Heads:
    """Return the heads of a gated delta rule, whose norm is that of a head."""
    keys, values = _keys(layer), _values(layer)
    channels = (keys, keys, values)
    counts = {
        "num_k_heads": (HeadPart(keys.count, is_shared=True),),
        "num_v_heads": (HeadPart(values.count),),
        "key_dim": (keys,),
        "value_dim": (values,),
        "conv_dim": channels,
    }
    return Heads(inputs, "conv1d", channels, values, ("dt_bias", "A_log"), counts)


def _mamba_heads(layer: Any) -> Heads:
    """Return the heads of Mamba2 (Nemotron-H, Bamba, Granite 4)."""
    values = HeadPart(layer.num_heads, layer.head_dim)
    groups = HeadPart(layer.n_groups, layer.ssm_state_size, is_shared=True)
    channels = (values, groups, groups)
    inputs = {"in_proj": (values, *channels, HeadPart(layer.num_heads))}
    counts = {
        "num_heads": (HeadPart(layer.num_heads),),
        "n_groups": (HeadPart(layer.n_groups, is_shared=True),),
        "intermediate_size": (values,),
        "conv_dim": channels,
    }
    per_head = ("dt_bias", "A_log", "D")
    return Heads(inputs, "conv1d", channels, values, per_head, counts, has_outer_norm=True)


# -- forward ---------------------------------------------------------------------------------------


def forward_shared(
    layer: Any, own: Callable[..., Tensor], hidden: Tensor, packing: Packing, run: SampleBySample
) -> Tensor:
    """Return what ``own``, the layer's forward, computes for this rank's tokens: [B, n, H] → [B, n, H]. Collective."""
    heads = heads_of(layer)
    if heads.divide(packing.context.size):
        return forward_heads(layer, heads, hidden, packing, run)
    context = packing.context
    gathered = gather_tokens(hidden, TensorGroup(context.rank, context.size, context.group))
    return run(own, gathered[:, places_of(packing)], packing)[:, packing.own]


def forward_heads(layer: Any, heads: Heads, hidden: Tensor, packing: Packing, run: SampleBySample) -> Tensor:
    """Return what the layer computes for this rank's tokens, each rank for its own heads. Collective."""
    context = packing.context
    projected = torch.cat([getattr(layer, name)(hidden) for name in heads.inputs], -1)
    gate, padding = None, 0
    if heads.has_outer_norm:
        width = heads.output.count * heads.output.width
        gate, projected = projected[..., :width], projected[..., width:]
        padding = width // context.size
    sent = projected[..., channels_of_ranks(heads.parts(), packing)]
    rows = to_all_tokens(sent, context)[:, places_of(packing)]
    if padding:  # the layer's own code splits a gate off, which nothing reads
        rows = F.pad(rows, (padding, 0))
    rows = run(share_of(layer, heads, packing).forward, rows, packing)
    out = to_own_tokens(rows[:, torch.cat(packing.tokens)], context)
    if gate is not None:
        out = layer.norm(out, gate).to(hidden.dtype)
    return layer.out_proj(out)


def channels_of_ranks(parts: HeadParts, packing: Packing) -> Tensor:
    """Return the channels of each rank in a tensor of ``parts``, [R, C]."""
    size = packing.context.size

    def make() -> Tensor:
        channels = np.array([channels_of(parts, rank, size) for rank in range(size)])
        return to_device({"channels": channels}, packing.positions.device)["channels"]

    return packing.once(("channels", parts), make)


def places_of(packing: Packing) -> Tensor:
    """Return, for each token of a row, its place among the tokens of rank 0, rank 1, …"""
    return packing.once("places", lambda: torch.cat(packing.tokens).argsort())


def to_all_tokens(values: Tensor, context: Context) -> Tensor:
    """Exchange [B, n, R, C] of own tokens, for each rank, for [B, R·n, C] of all ranks' tokens (all-to-all)."""
    sent = values.movedim(2, 0)
    return _exchange(sent, context).movedim(0, 1).flatten(1, 2)


def to_own_tokens(values: Tensor, context: Context) -> Tensor:
    """Exchange [B, R·n, C] of all ranks' tokens for [B, n, R·C] of own tokens (all-to-all)."""
    sent = values.unflatten(1, (context.size, -1)).movedim(1, 0)
    return _exchange(sent, context).movedim(0, 2).flatten(2)


def _exchange(values: Tensor, context: Context) -> Tensor:
    """[R, …] for each rank → [R, …] from each rank."""
    ones = [1] * context.size
    return AllToAll.apply(values.contiguous(), ones, ones, context.group)


def share_of(layer: nn.Module, heads: Heads, packing: Packing) -> Any:
    """Return a copy of ``layer`` with this rank's heads, without projections: it takes and returns their channels.

    Its parameters are slices of the layer's, through which gradients flow. It is not in training mode: then no kernel
    fuses the output projection into the recurrence, and these layers have no dropout.
    """
    size, rank = packing.context.size, packing.context.rank
    share: Any = copy(layer)
    share._parameters, share._modules, share.training = {}, {}, False
    share.forward = partial(type(layer).forward, share)
    for name, parts in heads.counts.items():
        setattr(share, name, num_channels(parts, rank, size))
    index = channels_of_ranks(heads.channels, packing)[rank]
    convolution: Any = getattr(layer, heads.convolution)
    bias = None if convolution.bias is None else convolution.bias[index]
    setattr(share, heads.convolution, SimpleNamespace(weight=convolution.weight[index], bias=bias))
    for name in heads.per_head:
        setattr(share, name, getattr(layer, name).chunk(size)[rank])
    start = 0
    for name, parts in heads.inputs.items():
        stop = start + num_channels(parts, rank, size)
        setattr(share, name, partial(_channels, start, stop))
        start = stop
    share.norm = _ungated if heads.has_outer_norm else getattr(layer, "norm", None)
    share.out_proj = nn.Identity()
    return share


def _channels(start: int, stop: int, projected: Tensor) -> Tensor:
    return projected[..., start:stop]


def _ungated(values: Tensor, gate: Tensor) -> Tensor:
    return values
