"""One block of ring attention by torch's flash kernels: this rank's queries over the keys of one rank.

With R ranks a row has 2R pieces, and a rank holds an early and a late one. Flash kernels know segments of consecutive
tokens, so a block is divided into pairs of pieces:

    same piece      causal, sample by sample
    earlier keys    at most one sample of a row reaches from the earlier piece into the later one; its first queries
                    see all of its keys (without a window all queries do), the next ones those within the window
    later keys      nothing

A window between two pieces that do not touch is shifted by their distance. A kernel has one window for all its
segments, so each segment with a window has a call of its own; there is at most one in a row and pair of pieces. It has
at least as many keys as queries: with fewer, FlashAttention-2 hides keys from the first queries of a segment whose
window is bounded on the left only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from primerl_hpc.trainer.batch import to_device
from primerl_hpc.trainer.parallel.context import Packing
from primerl_hpc.trainer.parallel.flash import (
    WIDTH_MULTIPLE,
    Segments,
    States,
    flash_backward,
    flash_forward,
    widen,
)


@dataclass(frozen=True)
class Span:
    """Consecutive query and key tokens of one sample: places among the B·n tokens of their ranks, [start, end)."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    window: int | None = None
    """As in `Segments`; None: every query sees every key."""


@dataclass(frozen=True)
class KernelCall:
    """Arguments of one call of the kernel. Indices are None if all tokens take part, in their order."""

    queries: Tensor | None  # [T] among B·n
    keys: Tensor | None
    segments: Segments

    def choose(self, states: States) -> States:
        return States(*map(chosen, states, (self.queries, self.keys, self.keys)))


class FlashBlocks:
    """Attention over one rank's keys; see `ring.Blocks`."""

    def __init__(self, packing: Packing, scale: float, window: int | None) -> None:
        self.packing, self.scale, self.window = packing, scale, window

    def forward(self, states: States, source: int) -> Iterator[tuple[Tensor, Tensor]]:
        batch, heads, length, _ = states.query.shape
        value_width = states.value.shape[-1]
        states = self._tokens(states)
        for call in self._calls(source):
            out, sums = flash_forward(call.choose(states), call.segments, self.scale)
            out, sums = out[..., :value_width].float(), sums.t()
            if call.queries is not None:
                out = out.new_zeros(batch * length, *out.shape[1:]).index_copy(0, call.queries, out)
                sums = sums.new_full((batch * length, heads), -torch.inf).index_copy(0, call.queries, sums)
            yield (
                out.unflatten(0, (batch, length)).transpose(1, 2),
                sums.unflatten(0, (batch, length)).transpose(1, 2),
            )

    def backward(
        self, states: States, source: int, out: Tensor, log_sums: Tensor, grad_out: Tensor
    ) -> States:
        shapes = [value.shape for value in states]
        states = self._tokens(states)
        width = states.query.shape[-1]
        out, grad_out = (widen(rows_of(value), width) for value in (out, grad_out))
        sums = log_sums.transpose(1, 2).flatten(0, 1)  # [B·n, heads]
        totals = [torch.zeros_like(value, dtype=torch.float32) for value in states]
        for call in self._calls(source):
            grads = flash_backward(
                chosen(grad_out, call.queries),
                call.choose(states),
                chosen(out, call.queries),
                chosen(sums, call.queries).t().contiguous(),
                call.segments,
                self.scale,
            )
            for total, grad, index in zip(totals, grads, (call.queries, call.keys, call.keys), strict=True):
                if index is None:
                    total.add_(grad)
                else:
                    total.index_add_(0, index, grad.float())
        return States(
            *(
                total[..., : shape[-1]].unflatten(0, (shape[0], shape[2])).transpose(1, 2)
                for total, shape in zip(totals, shapes, strict=True)
            )
        )

    def _tokens(self, states: States) -> States:
        """Return [B·n, heads, D] of equal width for the kernel."""
        width = -(-max(states.query.shape[-1], states.value.shape[-1]) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        return States(*(widen(rows_of(value), width) for value in states))

    def _calls(self, source: int) -> list[KernelCall]:
        key = ("flash calls", source, self.window)
        if key not in self.packing.cache:
            self.packing.cache[key] = self._make_calls(source)
        return self.packing.cache[key]

    def _make_calls(self, source: int) -> list[KernelCall]:
        is_own = source == self.packing.context.rank
        calls = [KernelCall(None, None, self.packing.own_segments(self.window))] if is_own else []
        for key_start, key_piece in self.packing.pieces_of(source):
            # a query has one span at most among the keys of one piece, so no query is twice in a call
            spans = spans_of(self.packing, key_start, key_piece, self.window)
            free = [span for span in spans if span.window is None]
            calls += [self._call(free)] if free else []
            calls += [self._call([span]) for span in spans if span.window is not None]
        return calls

    def _call(self, spans: list[Span]) -> KernelCall:
        queries, keys = ([span.queries for span in spans], [span.keys for span in spans])
        arrays = {}
        for name, ranges in (("queries", queries), ("keys", keys)):
            lengths = [end - start for start, end in ranges]
            arrays[name] = np.concatenate([np.arange(start, end) for start, end in ranges])
            arrays[f"{name}.bounds"] = np.cumsum([0, *lengths], dtype=np.int32)
        moved = to_device(arrays, self.packing.positions.device)
        segments = Segments(
            moved["queries.bounds"],
            moved["keys.bounds"],
            max(end - start for start, end in queries),
            max(end - start for start, end in keys),
            is_causal=False,
            window=spans[0].window,
        )
        return KernelCall(moved["queries"], moved["keys"], segments)


def rows_of(states: Tensor) -> Tensor:
    """Concatenate rows: [B, heads, n, D] → [B·n, heads, D]."""
    return states.transpose(1, 2).flatten(0, 1)


def chosen(states: Tensor, index: Tensor | None) -> Tensor:
    return states if index is None else states[index]


def spans_of(packing: Packing, key_start: int, key_piece: range, window: int | None) -> list[Span]:
    """Return the parts of samples that reach from a piece of keys into later pieces of this rank.

    ``key_start``: place of the piece among the tokens of its rank.
    """
    positions = packing.on_host()
    num_rows, row_length = positions.shape
    num_own = row_length // packing.context.size
    shift = key_start - key_piece.start
    found = []
    for query_start, query_piece in packing.pieces_of(packing.context.rank):
        if key_piece.start >= query_piece.start:
            continue
        query_shift = query_start - query_piece.start
        for row in range(num_rows):
            offset = row * num_own
            for queries, keys, shifted in _spans(positions[row], query_piece, key_piece, window):
                own = (offset + query_shift + queries.start, offset + query_shift + queries.stop)
                found.append(Span(own, (offset + shift + keys.start, offset + shift + keys.stop), shifted))
    return found


def _spans(
    positions: NDArray[np.int64], queries: range, keys: range, window: int | None
) -> Iterator[tuple[range, range, int | None]]:
    """Yield tokens of the sample that reaches from piece ``keys`` into ``queries``, and the kernel's window.

    ``positions`` [N] of one row; pieces are ranges of its tokens.
    """
    first = int(queries.start - positions[queries.start])  # where the sample of the first query starts
    if first >= keys.stop or int(positions[queries.start]) == 0:
        return
    ends = np.flatnonzero(positions[queries.start : queries.stop] == 0)
    last = queries.start + int(ends[0]) if len(ends) else queries.stop
    keys = range(max(first, keys.start), keys.stop)
    split = last if window is None else max(queries.start, min(last, keys.start + window))
    if split > queries.start:  # the queries before it see all keys
        yield range(queries.start, split), keys, None
    if window is None:
        return
    # the last query must still see the last key, and the first key must be seen by the first query
    queries = range(split, min(last, keys.stop - 1 + window))
    keys = range(max(keys.start, split - window + 1), keys.stop)
    if queries and keys:
        # a kernel aligns the ends of both segments; the last key is `gap` tokens before the last query instead
        gap = (queries.stop - 1) - (keys.stop - 1)
        yield queries, keys, window - gap
