"""Sparse attention whose keys an indexer chooses (DeepSeek-V3.2, GLM-5), on packed rows.

    index_packed_rows(blocks)      # the blocks' indexers and attention then see the samples of packed rows

For each token the indexer chooses ``index_topk`` keys; it is not trained. If no sample of the rows is longer, all keys
are chosen, and attention is that of other families. Otherwise indexer and attention go through each sample in pieces of
`QUERIES` tokens, so that memory grows with its length and not with its square.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primerl_hpc.trainer.parallel.context import Packing
from primerl_hpc.trainer.parallel.flash import States

QUERIES = 512
"""Queries whose scores with all earlier keys of their sample are in memory at the same time."""


def index_packed_rows(blocks: Sequence[nn.Module]) -> None:
    """Let the indexers of ``blocks`` choose keys within the samples of packed rows, and freeze them."""
    for block in blocks:
        attention: Any = block.self_attn
        attention.register_forward_pre_hook(_hand_packing_over, with_kwargs=True)
        if attention.indexer is not None:  # GLM-5.2: some layers take the keys that an earlier layer chose
            attention.indexer.requires_grad_(False)
            attention.indexer.forward = partial(_choose, attention.indexer, attention.indexer.forward)


def _hand_packing_over(
    attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    packing: Packing = kwargs["packing"]
    if attention.indexer is not None:
        attention.indexer.packing = packing
    # the model's code takes a part of it, which `_choose` does not read
    return args, kwargs | {"attention_mask": packing.positions[:, None, None]}


class _Keys:
    """The indexer's keys of a sample's earlier pieces, in the place of a cache."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def update_indexer(self, key: Tensor, layer: int) -> Tensor:
        self.keys.append(key)
        return torch.cat(self.keys, 1)


@torch.no_grad()
def _choose(
    indexer: Any,
    own: Callable[..., Tensor],
    hidden: Tensor,
    query: Tensor,
    embeddings: tuple[Tensor, Tensor],
    *others: Any,
    **more: Any,
) -> Tensor:
    """Return the keys that ``own`` chooses for each token, [B, N, K], as places in its sample; K is 0 for all keys.

    Keys after the token are among them. Where fewer than K were chosen, the last one is repeated.
    """
    packing, (batch, length) = indexer.packing, hidden.shape[:2]
    longest = max(packing.sample_lengths())
    if longest <= indexer.index_topk:
        return hidden.new_empty(batch, length, 0, dtype=torch.int32)
    parts = [part.flatten(0, 1) for part in (hidden, query, *embeddings)]
    chosen = hidden.new_empty(batch * length, min(indexer.index_topk, longest), dtype=torch.int32)
    for start, pieces in _pieces(packing):
        cache = _Keys()
        for first, end in pieces:
            tokens = slice(start + first, start + end)
            states, queries, *rotations = (part[None, tokens] for part in parts)
            seen = _causal(first, end, hidden.device)
            found = own(states, queries, tuple(rotations), seen[None], None, past_key_values=cache)[0]
            chosen[tokens, : found.shape[1]] = found
            chosen[tokens, found.shape[1] :] = found[:, -1:]
    return chosen.unflatten(0, (batch, length))


def _pieces(packing: Packing) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield the first token of each sample of concatenated rows, and the bounds of its pieces."""
    start = 0
    for size in packing.sample_lengths():
        yield start, [(first, min(first + QUERIES, size)) for first in range(0, size, QUERIES)]
        start += size


def _causal(first: int, end: int, device: torch.device) -> Tensor:
    """Return which of a sample's tokens [0, end) the tokens [first, end) see, [end − first, end]."""
    return torch.ones(end - first, end, dtype=torch.bool, device=device).tril(first)


def indexed_attention(states: States, chosen: Tensor, packing: Packing, scale: float) -> Tensor:
    """Return attention of each token to its ``chosen`` keys [B, N, K] up to itself, [B, N, heads, D_v]."""
    batch, _, length, _ = states.query.shape
    rows = [part.transpose(1, 2).flatten(0, 1).transpose(0, 1) for part in states]  # [heads, B·N, D]
    places, outs = chosen.flatten(0, 1).long(), []
    for start, pieces in _pieces(packing):
        for first, end in pieces:
            tokens, keys = slice(start + first, start + end), slice(start, start + end)
            seen = _causal(first, end, chosen.device)
            mask = torch.zeros_like(seen).scatter_(1, places[tokens], True) & seen
            query, key, value = rows[0][:, tokens], rows[1][:, keys], rows[2][:, keys]
            outs.append(F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale))
    return torch.cat(outs, 1).transpose(0, 1).unflatten(0, (batch, length))
