"""The attention function that models call through transformers' attention interface: packed rows, shared or not.

Masks come from the packing, not from the model's own code: some families (GPT-OSS in transformers 5.17) build theirs
without looking at positions, and samples of one row then see each other. Queries, keys and values come as [B, heads, n, D] of
this rank's n tokens.

    alone     whole rows through sdpa, plain matrices ("eager"), or a flash kernel
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
from primerl_hpc.trainer.parallel.ring import ring_attention

ATTENTION_NAME = "primerl_packed"
CHANGES_OF_SCORES = ("softcap", "position_bias", "indices", "block_indices")
"""What some families hand to their attention. A mask is refused too: the usual ones transformers builds for its own alone."""


def register_attention() -> None:
    AttentionInterface.register(ATTENTION_NAME, packed_attention)


@torch.compiler.disable  # kernels and collectives; its bookkeeping is not for a graph
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
    packing: Packing | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """→ [B, n, heads, D_v]. ``s_aux`` [heads]: learned sinks, a logit in each head's denominator that no value belongs to.

    Raises ConfigError where the model would have scores changed or keys hidden in a way that this does not do.
    """
    if packing is None:
        raise ConfigError(
            f"{type(module).__name__} does not hand keyword arguments to its attention: "
            "this model family cannot be trained on packed rows",
            mend="set model.attention to flash_attention_2 on a GPU",
        )
    asked = {"attention_mask": attention_mask} | {key: others.get(key) for key in CHANGES_OF_SCORES}
    if odd := [key for key, value in asked.items() if value is not None]:
        raise ConfigError(
            f"{type(module).__name__} gives its attention {odd[0]}, which this version does not train"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    context = packing.context
    if context.style == "ring" and context.size > 1:
        out, log_sums = ring_attention(query, key, value, packing, scale, sliding_window)
        return with_sinks(out, log_sums, s_aux).transpose(1, 2), None
    if context.size > 1:
        key, value = (repeat_heads(each, context.size) for each in (key, value))
        query, key, value = (to_heads(each, context) for each in (query, key, value))
        if s_aux is not None:
            s_aux = s_aux.chunk(context.size)[context.rank]
    out = whole_rows(query, key, value, packing, scale, dropout, sliding_window, s_aux)
    if context.size > 1:
        out = to_tokens(out, context)
    return out.transpose(1, 2), None


def whole_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scale: float,
    dropout: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """All N tokens of some heads → [B, heads, N, D_v]."""
    if packing.inner == "eager":
        out, log_sums = ring_attention(query, key, value, packing.alone(), scale, window)
        return with_sinks(out, log_sums, sinks)
    if sinks is not None:
        raise ConfigError(
            f"{packing.inner} has no attention sinks", mend="set model.attention to auto or eager"
        )
    if packing.inner != "sdpa":
        return flash(query, key, value, packing, scale, dropout, window)
    key, value = (repeat_heads(each, query.shape[1]) for each in (key, value))
    if (lengths := packing.lengths(window)) is not None:
        return by_sample(query, key, value, lengths, scale, dropout)
    mask = packing.mask(window, query.dtype)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, dropout_p=dropout
    )


def by_sample(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float, dropout: float
) -> Tensor:
    """Causal attention of one sample after another: no mask, and no work on what samples do not see of each other."""
    samples = zip(
        *(each.transpose(1, 2).flatten(0, 1).split(lengths) for each in (query, key, value)), strict=True
    )
    outs = [
        F.scaled_dot_product_attention(
            *(each.transpose(0, 1)[None] for each in sample), is_causal=True, scale=scale, dropout_p=dropout
        )[0].transpose(0, 1)
        for sample in samples
    ]
    return torch.cat(outs).unflatten(0, (len(query), -1)).transpose(1, 2)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scale: float,
    dropout: float,
    window: int | None,
) -> Tensor:
    """Rows one after another, cut at the starts of samples, through the flash kernel that transformers finds."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    batch, _, length, width = query.shape
    value_width = value.shape[-1]
    if value_width != width:  # kernels want one (multi-head latent attention has two)
        value = F.pad(value, (0, width - value_width))
    bounds, longest = packing.bounds()
    out = _flash_attention_forward(
        *(each.transpose(1, 2).flatten(0, 1)[None] for each in (query, key, value)),
        None,
        query_length=batch * length,
        is_causal=True,
        dropout=dropout,
        softmax_scale=scale,
        sliding_window=window,
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=longest,
        max_length_k=longest,
        attn_implementation=packing.inner,
    )
    return out.view(batch, length, -1, width)[..., :value_width].transpose(1, 2)


def with_sinks(out: Tensor, log_sums: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over keys becomes softmax over keys and sink: out · e^L / (e^L + e^sink). [B, heads, n, D], [B, heads, n]."""
    if sinks is None:
        return out
    share = torch.sigmoid(log_sums - sinks.float()[None, :, None])
    return out * share[..., None].to(out.dtype)


def repeat_heads(each: Tensor, size: int) -> Tensor:
    """Key or value heads, each as often as it takes to have at least ``size`` of them."""
    return each if each.shape[1] >= size else each.repeat_interleave(size // each.shape[1], 1)


def to_heads(each: Tensor, context: Context) -> Tensor:
    """All-to-all: [B, heads, n, D] of own tokens → [B, heads / size, N, D] of all."""
    batch, heads, length, width = each.shape
    size = context.size
    rows = each.view(batch, size, heads // size, length, width).transpose(0, 1).contiguous()
    rows = AllToAll.apply(rows, [1] * size, [1] * size, context.group)
    return rows.permute(1, 2, 0, 3, 4).reshape(batch, heads // size, size * length, width)


def to_tokens(each: Tensor, context: Context) -> Tensor:
    """The way back: [B, heads / size, N, D] → [B, heads, n, D]."""
    batch, heads, length, width = each.shape
    size = context.size
    rows = each.reshape(batch, heads, size, length // size, width).permute(2, 0, 1, 3, 4).contiguous()
    rows = AllToAll.apply(rows, [1] * size, [1] * size, context.group)
    return rows.transpose(0, 1).reshape(batch, size * heads, length // size, width)
