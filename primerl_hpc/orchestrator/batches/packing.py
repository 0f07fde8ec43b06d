"""Pack samples into rows of at most ``seq_len`` tokens, the same number of rows for every data-parallel rank.

FSDP ranks run in lockstep: a micro-step takes as long as its slowest row. So:

1. the number of rows is the smallest multiple of the number of ranks into which we can fit the samples;
2. samples go longest first into the *cheapest* row that still has room (LPT with a hard cap on tokens); where that
   needs more rows than necessary, the longest samples go into the *fullest* row that has room;
3. rows sorted by cost are dealt so that the rows of each micro-step have similar costs.

tools/bench/packing.py compares the result with other packers.

    packed = pack(samples, seq_len=2048, num_ranks=8)       # packed.ranks[r]: list[MicroBatch]
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.rollout_data import TrainSample
from primerl_hpc.transport.rollouts.micro_batch import MicroBatch, empty_row

# Sequence length at which attention costs as much as the matrices: P/(layers·heads·head_dim), 8 k to 27 k tokens for
# models of 0.6 to 4 B parameters. Only balance depends on it.
QUADRATIC_AT_TOKENS = 16_384

COST_UNITS = 1 << 20
"""Units in the linear cost of one token: costs are integers while rows are filled."""

TIGHT_SHARES = (4, 8, 16)
"""If plain LPT fails: samples longer than cap/4 (then /8, /16) go into the fullest row, others into the cheapest."""


@dataclass
class Packed:
    """The packed rows: ``ranks[r]`` holds the rows of rank r."""

    ranks: list[list[MicroBatch]]
    num_truncated: int
    num_untrainable: int  # samples without a trained token in the first seq_len tokens
    num_dummies: int
    fill: float  # useful tokens / (rows × seq_len)


def cost_of(lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the linear (matrix) plus quadratic (attention) cost of sequences, in tokens. Same shape as ``lengths``."""
    return lengths + lengths.astype(np.float64) ** 2 / QUADRATIC_AT_TOKENS


def assign_rows(lengths: NDArray[np.int64], cap: int, num_ranks: int) -> list[list[int]]:
    """Return the sample indices of each row; the rows are a multiple of ``num_ranks`` and the last may be empty."""
    order = np.argsort(-lengths, kind="stable").tolist()
    sizes = lengths.tolist()
    costs = np.rint(cost_of(lengths) * COST_UNITS).astype(np.int64).tolist()
    needed = max(1, -(-int(lengths.sum()) // cap))
    num_rows = -(-needed // num_ranks) * num_ranks
    tight: list[list[int]] | None = None
    while True:
        if (rows := _place(order, sizes, costs, cap, num_rows)) is not None:
            return rows
        for share in TIGHT_SHARES:
            if (rows := _place(order, sizes, costs, cap, num_rows, tight_above=cap // share)) is not None:
                return rows
        if tight is None:
            tight = _first_fit(order, sizes, cap)
            tight += [[] for _ in range(-len(tight) % num_ranks)]
        if num_rows >= len(tight):
            return _even_out(tight, sizes, costs, cap, num_ranks)
        num_rows += num_ranks


def _place(
    order: list[int],
    sizes: list[int],
    costs: list[int],
    cap: int,
    num_rows: int,
    tight_above: int | None = None,
) -> list[list[int]] | None:
    """Place samples longest first into the cheapest row with room; those above ``tight_above`` into the fullest.

    Return None if a sample fits into no row. A row too full for the current sample is parked by its room and returns
    when samples are small enough, so each placement moves a row at most once in and once out. A row in a heap or sorted
    list is one number (the sort key, then the row), which compares faster than a pair.
    """
    bits = num_rows.bit_length()
    mask = (1 << bits) - 1
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    room, spent = [cap] * num_rows, list(range(num_rows))  # spent: cost, row
    num_tight = 0
    if tight_above is not None:
        num_tight = sum(size > tight_above for size in sizes)
        open_rows: list[int] = []  # room, row: the fullest first
        for index in order[:num_tight]:
            size = sizes[index]
            if len(open_rows) < num_rows:
                row = len(open_rows)
            elif (position := bisect_left(open_rows, size << bits)) < num_rows:
                row = open_rows.pop(position) & mask
            else:
                return None
            rows[row].append(index)
            room[row] -= size
            spent[row] += costs[index] << bits
            insort(open_rows, room[row] << bits | row)
    cheapest = spent[:]
    heapq.heapify(cheapest)
    parked: list[int] = []  # cap - room, row
    push, pop, replace_first = heapq.heappush, heapq.heappop, heapq.heapreplace
    for index in order[num_tight:]:
        size = sizes[index]
        while parked and parked[0] >> bits <= cap - size:
            push(cheapest, spent[pop(parked) & mask])
        while cheapest and room[row := cheapest[0] & mask] < size:
            spent[row] = pop(cheapest)
            push(parked, cap - room[row] << bits | row)
        if not cheapest:
            return None
        rows[row].append(index)
        room[row] -= size
        replace_first(cheapest, cheapest[0] + (costs[index] << bits))
    return rows


def _first_fit(order: list[int], sizes: list[int], cap: int) -> list[list[int]]:
    """First-fit decreasing, row by row: add the longest remaining sample that fits, until none does."""
    left = order[::-1]  # shortest first
    left_sizes = [sizes[index] for index in left]
    rows: list[list[int]] = []
    while left:
        row, room = [], cap
        while (position := bisect_right(left_sizes, room) - 1) >= 0:
            room -= left_sizes.pop(position)
            row.append(left.pop(position))
        rows.append(row)
    return rows


def _even_out(
    rows: list[list[int]], sizes: list[int], costs: list[int], cap: int, num_ranks: int
) -> list[list[int]]:
    """Redistribute the samples of each micro-step over its rows where that makes its costliest row cheaper."""

    def cost(row: list[int]) -> int:
        return sum(costs[index] for index in row)

    rows = sorted(rows, key=lambda row: -cost(row))
    result: list[list[int]] = []
    for start in range(0, len(rows), num_ranks):
        step = rows[start : start + num_ranks]
        order = sorted((index for row in step for index in row), key=lambda index: -sizes[index])
        spread = _place(order, sizes, costs, cap, num_ranks)
        result += step if spread is None or max(map(cost, spread)) > cost(step[0]) else spread
    return result


def deal_rows(rows: list[list[int]], row_costs: list[float], num_ranks: int) -> list[list[list[int]]]:
    """Return the rows of each rank: ``result[r]``.

    Consecutive rows in the order of cost share a micro-step; the direction of dealing alternates.
    """
    order = sorted(range(len(rows)), key=lambda row: -row_costs[row])
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for micro_step in range(len(rows) // num_ranks):
        chunk = order[micro_step * num_ranks : (micro_step + 1) * num_ranks]
        for rank, row in enumerate(chunk if micro_step % 2 == 0 else reversed(chunk)):
            ranks[rank].append(rows[row])
    return ranks


def pack(samples: list[TrainSample], *, seq_len: int, num_ranks: int) -> Packed:
    """Pack all samples into rows of at most ``seq_len`` tokens.

    A dummy row of zero weight is added only where a rank would have no row in a micro-step. Samples with images are
    packed into rows of their own, in micro-steps of their own.
    """
    num_truncated = sum(sample.sample.num_tokens > seq_len for sample in samples)
    kept = [sample for sample in samples if sample.is_trained(seq_len)]
    if not kept:
        dummies = [[empty_row()] for _ in range(num_ranks)]
        return Packed(dummies, num_truncated, len(samples), num_ranks, 0.0)
    kinds = [
        [sample for sample in kept if bool(sample.sample.images) is has_images]
        for has_images in (False, True)
    ]
    ranks: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    num_rows = num_dummies = num_tokens = 0
    for kind in filter(None, kinds):
        lengths = np.asarray([sample.sample.tokens_within(seq_len) for sample in kind], np.int64)
        rows = assign_rows(lengths, seq_len, num_ranks)
        costs = cost_of(lengths).tolist()
        dealt = deal_rows(rows, [sum(costs[index] for index in row) for row in rows], num_ranks)
        for done, rank in zip(ranks, dealt, strict=True):
            done += [
                _row([kind[index] for index in row], lengths[row]) if row else empty_row() for row in rank
            ]
        num_rows += len(rows)
        num_dummies += sum(not row for row in rows)
        num_tokens += int(lengths.sum())
    return Packed(
        ranks=ranks,
        num_truncated=num_truncated,
        num_untrainable=len(samples) - len(kept),
        num_dummies=num_dummies,
        fill=num_tokens / (num_rows * seq_len),
    )


def _row(samples: list[TrainSample], lengths: NDArray[np.int64]) -> MicroBatch:
    """Build a row from the first ``lengths`` [S] tokens of each sample."""
    streams = [sample.sample for sample in samples]
    starts = (np.cumsum(lengths) - lengths).tolist()

    def join(parts: list[NDArray], dtype: type) -> NDArray:
        return np.concatenate([part[:n] for part, n in zip(parts, lengths, strict=True)], dtype=dtype)

    def join_or_none(parts: list[NDArray[np.float32] | None]) -> NDArray[np.float32] | None:
        if all(part is None for part in parts):
            return None
        zeros = np.zeros(lengths.max(), np.float32)
        return join([zeros if part is None else part for part in parts], np.float32)

    return MicroBatch(
        input_ids=join([stream.token_ids for stream in streams], np.int32),
        loss_mask=join([stream.loss_mask for stream in streams], np.bool_),
        inference_logprobs=join([stream.logprobs for stream in streams], np.float32),
        sample_lengths=lengths,
        temperatures=np.asarray([stream.temperature for stream in streams], np.float32),
        advantages=np.asarray([sample.advantage for sample in samples], np.float32),
        rl_weights=np.asarray([sample.rl_weight for sample in samples], np.float32),
        ref_kl_weights=np.asarray([sample.ref_kl_weight for sample in samples], np.float32),
        env_ids=np.asarray([sample.env_id for sample in samples], np.int32),
        ce_weights=join_or_none([sample.ce_weights for sample in samples]),
        ref_logprobs=join_or_none([sample.ref_logprobs for sample in samples]),
        routed_experts=_join_routed([stream.routed_experts for stream in streams], lengths),
        images=tuple(
            replace(placed, start=start + placed.start)
            for stream, start, length in zip(streams, starts, lengths, strict=True)
            for placed in stream.images
            if placed.start < length
        ),
    )


def _join_routed(samples: list[list[NDArray] | None], lengths: NDArray[np.int64]) -> NDArray | None:
    """Concatenate the selected experts of the first ``lengths`` [S] tokens of each sample, zeros where it has none.

    Return None if no sample has any.
    """
    known = [part for parts in samples for part in parts or ()]
    if not known:
        return None
    row = np.zeros((lengths.sum(), *known[0].shape[1:]), np.result_type(*known))
    for parts, end, length in zip(samples, np.cumsum(lengths), lengths, strict=True):
        start = end - length
        for part in parts or ():
            row[start:end][: len(part)] = part[: end - start]
            start = min(start + len(part), end)
    return row
