"""The trainer's count of FLOP against its earlier formula."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.plan.predict.flops import AttentionFlops, Flops, visible_pairs

np = pytest.importorskip("numpy")


LENGTHS = st.lists(st.integers(0, 131_072), max_size=40)
WINDOWS = st.one_of(st.none(), st.integers(1, 4096))


def earlier_count(blocks, head, attention, windows, lengths, predicted, tokens):
    """The expression that `FlopCounter` computed with numpy before the count moved to the planner."""
    array = np.array(lengths, float)

    def seen_keys(window):
        widths = array if window is None else np.minimum(array, window)
        return float((widths * array - widths**2 / 2).sum())

    pairs = sum(count * seen_keys(window) for window, count in windows.items())
    return blocks * tokens + head * predicted + attention * pairs


@given(LENGTHS, st.dictionaries(WINDOWS, st.integers(1, 126), max_size=3), st.integers(1, 10**6))
def test_the_trainers_count_is_bit_equal_to_the_earlier_formula(lengths, windows, per_pair):
    blocks, head, predicted = 6.0 * 8_030_261_248 * 1.037, 6.0 * 525_336_576, len(lengths)
    flops = Flops(blocks, head, (AttentionFlops(per_pair, Counter(windows)),))
    tokens = sum(lengths) + 17
    expected = earlier_count(blocks, head, per_pair, windows, lengths, predicted, tokens)
    assert flops.count(lengths, predicted, tokens) == expected


@given(st.integers(1, 400), WINDOWS)
def test_pairs_are_counted_one_by_one(length, window):
    pairs = sum(min(query + 1, window or length) for query in range(length))
    halves = min(length, window or length) / 2
    assert visible_pairs([length], window) == pairs - halves
