"""CPU versions of torch's two flash attention operators, by their documented contract, for tests without a GPU.

    with flash_kernels_on_cpu():
        flash_attention(...)

The forward returns output and log-sum-exp. The backward uses the given output and log-sum-exp, as the kernels do:
P = e^(S − L), and the gradient of a score is P · (⟨ō, v⟩ − ⟨ō, o⟩).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.library import Library


@contextmanager
def flash_kernels_on_cpu() -> Iterator[list[int]]:
    """Register the operators for CPU tensors. Yields a list to which each forward appends its number of segments."""
    calls: list[int] = []

    def forward(
        query, key, value, bounds, key_bounds, longest, longest_key, dropout, is_causal, debug, **more
    ):
        check(query, key, value, bounds, key_bounds, longest, longest_key)
        calls.append(len(bounds) - 1)
        out, sums = torch.zeros_like(query), query.new_zeros(query.shape[1], len(query), dtype=torch.float32)
        for queries, keys, scores in segments(query, key, bounds, key_bounds, is_causal, more):
            sums[:, queries] = scores.logsumexp(-1).float()
            values = spread(value[keys], query).double()
            out[queries] = (scores.softmax(-1) @ values.transpose(0, 1)).transpose(0, 1).to(out.dtype)
        empty = query.new_zeros(0)
        return out, sums, torch.zeros(2, dtype=torch.int64), empty, empty

    def backward(
        grad,
        query,
        key,
        value,
        out,
        sums,
        bounds,
        key_bounds,
        longest,
        longest_key,
        dropout,
        is_causal,
        *state,
        **more,
    ):
        check(query, key, value, bounds, key_bounds, longest, longest_key)
        assert sums.shape == (query.shape[1], len(query)) and sums.dtype == torch.float32
        grads = [torch.zeros_like(states, dtype=torch.float64) for states in (query, key, value)]
        repeats = query.shape[1] // key.shape[1]
        for queries, keys, scores in segments(query, key, bounds, key_bounds, is_causal, more):
            probs = (scores - sums[:, queries, None].double()).exp()  # [heads, q, k]
            given = grad[queries].double().transpose(0, 1)
            values = spread(value[keys], query).double().transpose(0, 1)
            delta = (given * out[queries].double().transpose(0, 1)).sum(-1, keepdim=True)
            inner = probs * (given @ values.transpose(-1, -2) - delta) * more["scale"]
            grads[0][queries] += (inner @ spread(key[keys], query).double().transpose(0, 1)).transpose(0, 1)
            for number, found in (
                (1, inner.mT @ query[queries].double().transpose(0, 1)),
                (2, probs.mT @ given),
            ):
                grads[number][keys] += found.unflatten(0, (-1, repeats)).sum(1).transpose(0, 1)
        return tuple(found.to(query.dtype) for found in grads)

    library = Library("aten", "IMPL")
    try:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield calls
    finally:
        library._destroy()


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    key_bounds: Tensor,
    longest: int,
    longest_key: int,
) -> None:
    """Assert what the kernels require of their arguments."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
    assert key.shape[1] == value.shape[1] and query.shape[1] % key.shape[1] == 0
    for found, rows, most in ((bounds, query, longest), (key_bounds, key, longest_key)):
        assert found.dtype == torch.int32 and found[0] == 0 and found[-1] == len(rows)
        assert found.diff().min() > 0 and found.diff().max() == most
    assert len(bounds) == len(key_bounds)


def segments(
    query: Tensor, key: Tensor, bounds: Tensor, key_bounds: Tensor, is_causal: bool, more: dict
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the tokens of each segment and their scores [heads, q, k], float64, −inf where a query sees no key."""
    longest = int(key_bounds.diff().max())
    left, right = kernel_window(more["window_size_left"], more["window_size_right"], is_causal, longest)
    for (first, last), (key_first, key_last) in zip(
        zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True),
        zip(key_bounds[:-1].tolist(), key_bounds[1:].tolist(), strict=True),
        strict=True,
    ):
        queries, keys = slice(first, last), slice(key_first, key_last)
        scores = query[queries].double().transpose(0, 1) @ spread(key[keys], query).double().permute(1, 2, 0)
        place = torch.arange(last - first)[:, None] + (key_last - key_first) - (last - first)
        number = torch.arange(key_last - key_first)
        seen = torch.ones(last - first, key_last - key_first, dtype=torch.bool)
        seen &= (number <= place + right) if right >= 0 else True
        seen &= (number >= place - left) if left >= 0 else True
        yield queries, keys, (scores * more["scale"]).masked_fill(~seen, -torch.inf)


def kernel_window(left: int, right: int, is_causal: bool, longest_key: int) -> tuple[int, int]:
    """Return the window that FlashAttention-2 applies (`mha_varlen_fwd`, `set_params_fprop`); −1: unbounded.

    If one side is bounded, the other one is ``longest_key`` instead of unbounded. Counted from the end of both
    segments, this hides keys from the first queries of a segment with more queries than keys.
    """
    left, right = (-1 if side >= longest_key else side for side in (left, right))
    right = 0 if is_causal else right
    if left < 0 <= right:
        left = longest_key
    elif right < 0 <= left:
        right = longest_key
    return left, right


def spread(states: Tensor, query: Tensor) -> Tensor:
    """Repeat key or value heads for the query heads that share them."""
    return states.repeat_interleave(query.shape[1] // states.shape[1], 1)
