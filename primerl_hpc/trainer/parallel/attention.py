"""The attention function that models call through transformers' attention interface: packed rows, shared or not.

Masks are computed from the packing, not by the model's own code: some families (GPT-OSS in transformers 5.17) build
theirs without reading positions, and samples of one row would then attend to each other. Queries, keys and values are
[B, heads, n, D] of this rank's n tokens.

    alone     full rows through torch's flash attention ("varlen"), sdpa, plain matrices ("eager"), or a flash package
    ulysses   all-to-all: n tokens of all heads → all N tokens of some heads → as alone → back
    ring      `ring_attention`
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.trainer.parallel.context import Context, Packing
from primerl_hpc.trainer.parallel.dispatch import AllToAll
from primerl_hpc.trainer.parallel.flash import States, compiled_flash_attention, flash_attention
from primerl_hpc.trainer.parallel.indexed import indexed_attention
from primerl_hpc.trainer.parallel.ring import ring_attention

ATTENTION_NAME = "primerl_packed"
VARLEN = "varlen"
SCORE_CHANGES = ("position_bias", "block_indices")
"""Arguments that some families pass to their attention. A mask is refused too: transformers builds the usual ones only
for its own implementations."""


CHUNK, PACKING, TEMPERATURE = "chunk_tokens", "packing_of_block", "temperature_of_positions"
"""Attributes of attention modules: tokens of a chunk of chunked attention; the packing of a family that does not pass
keyword arguments on; floor and factor of `position_scales`. `families.prepare_attention` sets them."""


def register_attention() -> None:
    AttentionInterface.register(ATTENTION_NAME, packed_attention)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    packing: Packing | None = None,
    indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention output [B, n, heads, D_v].

    ``s_aux`` [heads]: learned sinks, a logit in each head's denominator that has no value. ``softcap``: see
    `ring_attention`. ``indices``: see `indexed`. Raises ConfigError if the model requests changed scores or hidden keys
    that this function does not compute.
    """
    packing = packing or getattr(module, PACKING, None)
    if packing is None:
        raise ConfigError(
            f"{type(module).__name__} does not pass keyword arguments to its attention: "
            "this model family cannot be trained on packed rows",
            hint="set model.attention to flash_attention_2 on a GPU",
        )
    if indices is not None:
        attention_mask = None  # that of `indexed`
    passed = {"attention_mask": attention_mask} | {key: others.get(key) for key in SCORE_CHANGES}
    if unsupported := [key for key, value in passed.items() if value is not None]:
        raise ConfigError(
            f"{type(module).__name__} passes {unsupported[0]} to its attention, which this version "
            "does not train"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if indices is not None and indices.shape[-1]:
        return indexed_attention(States(query, key, value), indices, packing, scale), None
    chunk, tuning = getattr(module, CHUNK, None), getattr(module, TEMPERATURE, None)
    if tuning is not None:
        query = (query * position_scales(packing, *tuning)).to(query.dtype)
    has_kernel = not dropout and softcap is None and chunk is None
    if torch.compiler.is_compiling() and packing.samples is not None and has_kernel:
        rows = States(*(concatenated(part) for part in (query, key, value)))
        out = compiled_flash_attention(rows, s_aux, packing.samples, scale, sliding_window)
        return out.unflatten(0, (query.shape[0], query.shape[2])), None
    if chunk is not None:
        packing = CHUNKS(packing, chunk)
    states = States(query, key, value)
    return OUTSIDE_GRAPHS(states, packing, scale, dropout, sliding_window, s_aux, softcap), None


def any_attention(
    states: States,
    packing: Packing,
    scale: float,
    dropout: float,
    window: int | None,
    sinks: Tensor | None,
    cap: float | None,
) -> Tensor:
    """Return the attention output [B, n, heads, D_v] of this rank's tokens. Collective over the ranks of a row."""
    query, key, value = states
    context = packing.context
    if dropout and (packing.inner in ("eager", VARLEN) or (context.style == "ring" and context.size > 1)):
        raise ConfigError(
            f"the model's attention has dropout {dropout}, which {packing.inner} and ring attention do not compute",
            hint="set sft.model_dropout to false, or model.attention to sdpa and "
            "layout.trainer.context_style to ulysses",
        )
    if sinks is not None and len(sinks) > query.shape[1]:  # tensor parallelism: of this rank's heads
        sinks = sinks[context.tensor.part_of(len(sinks))]
    if context.style == "ring" and context.size > 1:
        return ring_attention(states, packing, scale, window, sinks, cap).transpose(1, 2).contiguous()
    if context.size > 1:
        key, value = (repeat_heads(heads, context.size) for heads in (key, value))
        query, key, value = (to_heads(part, context) for part in (query, key, value))
        if sinks is not None:
            sinks = sinks.chunk(context.size)[context.rank]
    out = full_rows(States(query, key, value), packing, scale, dropout, window, sinks, cap)
    if context.size > 1:
        out = to_tokens(out, context)
    return out.transpose(1, 2).contiguous()  # some families view it as [B, n, heads · D_v]


OUTSIDE_GRAPHS: Any = torch.compiler.disable(any_attention)
"""`any_attention` between compiled graphs: it calls kernels and collectives and caches masks."""
CHUNKS: Any = torch.compiler.disable(Packing.chunked)


def position_scales(packing: Packing, floor: float, factor: float) -> Tensor:
    """Return what Llama 4 multiplies queries by, [B, 1, n, 1]: 1 + factor · log(1 + ⌊(position + 1) / floor⌋)."""
    positions = packing.positions[:, packing.own].float()
    return (torch.log1p(torch.floor((positions + 1) / floor)) * factor + 1)[:, None, :, None]


def full_rows(
    states: States,
    packing: Packing,
    scale: float,
    dropout: float,
    window: int | None,
    sinks: Tensor | None,
    cap: float | None = None,
) -> Tensor:
    """Compute attention of all N tokens for some heads. Returns [B, heads, N, D_v]."""
    query, key, value = states
    if packing.inner == "eager":
        return ring_attention(states, packing.alone(), scale, window, sinks, cap)
    if cap is not None:
        raise ConfigError(
            f"{packing.inner} attention does not cap scores", hint="set model.attention to auto or eager"
        )
    if packing.inner == VARLEN:
        query_rows, key_rows, value_rows = (concatenated(part) for part in states)
        out = flash_attention(query_rows, key_rows, value_rows, sinks, packing.segments(window), scale)
        return out.unflatten(0, (len(query), -1)).transpose(1, 2)
    if sinks is not None:
        raise ConfigError(
            f"{packing.inner} attention does not support sinks", hint="set model.attention to auto or eager"
        )
    if packing.inner != "sdpa":
        return flash(states, packing, scale, dropout, window)
    key, value = (repeat_heads(heads, query.shape[1]) for heads in (key, value))
    if (lengths := packing.lengths(window)) is not None:
        return by_sample(query, key, value, lengths, scale, dropout)
    mask = packing.mask(window, query.dtype)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, dropout_p=dropout
    )


def by_sample(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float, dropout: float
) -> Tensor:
    """Compute causal attention sample by sample: without a mask, and without work on pairs of different samples."""
    samples = zip(*(concatenated(states).split(lengths) for states in (query, key, value)), strict=True)
    outs = [
        F.scaled_dot_product_attention(
            *(states.transpose(0, 1)[None] for states in sample),
            is_causal=True,
            scale=scale,
            dropout_p=dropout,
        )[0].transpose(0, 1)
        for sample in samples
    ]
    return torch.cat(outs).unflatten(0, (len(query), -1)).transpose(1, 2)


def concatenated(states: Tensor) -> Tensor:
    """Concatenate rows: [B, heads, N, D] → [B·N, heads, D]."""
    return states.transpose(1, 2).flatten(0, 1)


def flash(states: States, packing: Packing, scale: float, dropout: float, window: int | None) -> Tensor:
    """Compute attention of concatenated rows, split at the starts of samples, by transformers' flash kernel."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    query, key, value = states
    batch, _, length, width = query.shape
    value_width = value.shape[-1]
    if value_width != width:  # kernels need one width; multi-head latent attention has two
        value = F.pad(value, (0, width - value_width))
    samples = packing.segments()
    lengths: dict[str, Any] = {"cu_seq_lens_q": samples.query_bounds, "cu_seq_lens_k": samples.key_bounds}
    lengths |= {"max_length_q": samples.longest_query, "max_length_k": samples.longest_key}
    query, key, value = (concatenated(part)[None] for part in (query, key, value))
    out = _flash_attention_forward(
        query,
        key,
        value,
        None,
        query_length=batch * length,
        is_causal=True,
        dropout=dropout,
        softmax_scale=scale,
        sliding_window=window,
        attn_implementation=packing.inner,
        **lengths,
    )
    return out.view(batch, length, -1, width)[..., :value_width].transpose(1, 2)


def repeat_heads(heads: Tensor, size: int) -> Tensor:
    """Repeat key or value heads so that there are at least ``size`` of them."""
    return heads if heads.shape[1] >= size else heads.repeat_interleave(size // heads.shape[1], 1)


def to_heads(states: Tensor, context: Context) -> Tensor:
    """Exchange [B, heads, n, D] of own tokens for [B, heads / size, N, D] of all tokens (all-to-all)."""
    batch, heads, length, width = states.shape
    size = context.size
    rows = states.view(batch, size, heads // size, length, width).transpose(0, 1).contiguous()
    rows = AllToAll.apply(rows, [1] * size, [1] * size, context.group)
    return rows.permute(1, 2, 0, 3, 4).reshape(batch, heads // size, size * length, width)


def to_tokens(states: Tensor, context: Context) -> Tensor:
    """Invert `to_heads`: [B, heads / size, N, D] → [B, heads, n, D]."""
    batch, heads, length, width = states.shape
    size = context.size
    rows = states.reshape(batch, heads, size, length // size, width).permute(2, 0, 1, 3, 4).contiguous()
    rows = AllToAll.apply(rows, [1] * size, [1] * size, context.group)
    return rows.transpose(0, 1).reshape(batch, size * heads, length // size, width)
