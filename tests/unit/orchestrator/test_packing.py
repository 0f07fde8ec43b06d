"""Packing: nothing lost, nothing twice, no row above the cap, the same number of rows for every rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl_hpc.orchestrator.batches.packing import _even_out, assign_rows, cost_of, deal_rows, pack
from primerl_hpc.orchestrator.rollout_data import Sample, TrainSample
from primerl_hpc.transport.rollouts.micro_batch import Picture, PlacedPicture

CAP = 64
lengths_strategy = st.lists(st.integers(2, CAP), min_size=1, max_size=120)


def sample_of(length: int, mark: int, *, prompt: int = 1) -> TrainSample:
    """A sample whose every token id is ``mark``; trained after ``prompt`` tokens."""
    mask = np.arange(length) >= prompt
    sample = Sample(
        token_ids=np.full(length, mark, np.int64),
        loss_mask=mask,
        logprobs=np.where(mask, np.float32(-0.5), np.float32(0)),
        temperature=0.7,
    )
    return TrainSample(sample, advantage=float(mark + 1), env_id=mark % 3)


@given(lengths_strategy, st.integers(1, 9))
def test_every_sample_lies_in_exactly_one_row_below_the_cap(lengths, num_ranks):
    rows = assign_rows(np.array(lengths), CAP, num_ranks)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= CAP for row in rows)
    assert len(rows) % num_ranks == 0


@given(lengths_strategy, st.integers(1, 9))
def test_no_rank_gets_an_empty_row_while_there_are_samples_enough(lengths, num_ranks):
    rows = assign_rows(np.array(lengths), CAP, num_ranks)
    if len(lengths) >= len(rows):
        assert all(rows)


@given(lengths_strategy, st.integers(1, 9))
def test_no_more_rows_than_first_fit_decreasing_needs(lengths, num_ranks):
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, left in enumerate(room) if left >= length]
        if fitting:
            room[fitting[0]] -= length
        else:
            room.append(CAP - length)
    rows = assign_rows(np.array(lengths), CAP, num_ranks)
    assert len(rows) <= -(-len(room) // num_ranks) * num_ranks


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(1, 8), st.integers(20, 400))
def test_long_tails_are_cut_as_well_below_the_cap_without_loss(seed, num_ranks, count):
    """Half of them too long to share a row: where first-fit's rows are taken and evened out."""
    rng = np.random.default_rng(seed)
    lengths = np.where(
        rng.random(count) < 0.5, rng.integers(CAP // 2, CAP + 1, count), rng.integers(1, CAP // 3, count)
    )
    rows = assign_rows(lengths, CAP, num_ranks)
    assert sorted(index for row in rows for index in row) == list(range(count))
    assert all(lengths[row].sum() <= CAP for row in rows)
    assert len(rows) % num_ranks == 0


@given(lengths_strategy, st.integers(1, 9))
def test_rows_are_at_most_twice_what_the_tokens_need(lengths, num_ranks):
    rows = assign_rows(np.array(lengths), CAP, num_ranks)
    assert len(rows) <= 2 * -(-sum(lengths) // CAP) + 2 * num_ranks


@settings(max_examples=60)
@given(lengths_strategy, st.integers(1, 5), st.integers(16, CAP))
def test_packed_streams_contain_the_samples(lengths, num_ranks, seq_len):
    samples = [sample_of(length, mark) for mark, length in enumerate(lengths)]
    packed = pack(samples, seq_len=seq_len, num_ranks=num_ranks)
    rows = [row for rank in packed.ranks for row in rank]
    assert len(packed.ranks) == num_ranks
    assert len({len(rank) for rank in packed.ranks}) == 1
    assert all(row.num_tokens <= seq_len for row in rows)
    assert packed.num_truncated == sum(length > seq_len for length in lengths)
    seen = []
    for row in rows:
        starts = np.concatenate([[0], np.cumsum(row.sample_lengths)[:-1]])
        for place, (start, length) in enumerate(zip(starts, row.sample_lengths, strict=True)):
            part = slice(start, start + length)
            assert row.position_ids[part].tolist() == list(range(length))
            assert not row.loss_mask[start]
            if not row.loss_mask[part].any():
                continue  # a dummy
            mark = int(row.input_ids[start])
            seen.append((mark, int(length)))
            trained = row.loss_mask[part]
            assert set(row.input_ids[part].tolist()) == {mark}
            assert row.advantages[place] == float(mark + 1)
            assert row.weights("rl")[part].tolist() == trained.tolist()
            assert set(row.inference_logprobs[part][trained].tolist()) == {-0.5}
            assert row.env_ids[place] == mark % 3
            assert row.temperatures[place] == np.float32(0.7)
    assert sorted(seen) == [(mark, min(length, seq_len)) for mark, length in enumerate(lengths)]


def test_a_dummy_row_is_made_only_where_a_rank_would_be_idle_and_trains_nothing():
    packed = pack([sample_of(5, 0)], seq_len=CAP, num_ranks=4)
    assert packed.num_dummies == 3
    trained = [int(row.loss_mask.sum()) for rank in packed.ranks for row in rank]
    assert sorted(trained) == [0, 0, 0, 4]
    assert pack([sample_of(5, mark) for mark in range(4)], seq_len=CAP, num_ranks=4).num_dummies == 0


def test_a_sample_whose_completion_lies_beyond_the_cap_is_counted_and_left_out():
    packed = pack([sample_of(60, 0, prompt=50), sample_of(20, 1)], seq_len=40, num_ranks=1)
    assert packed.num_untrainable == 1
    assert packed.num_truncated == 1
    assert packed.ranks[0][0].sample_lengths.tolist() == [20]


@settings(max_examples=40)
@given(lengths_strategy, st.integers(16, CAP), st.data())
def test_selected_experts_stay_with_their_tokens(lengths, seq_len, data):
    """Token t of sample m has (m + 1, t + 1): in parts, of different width, or missing."""
    samples = [sample_of(length, mark) for mark, length in enumerate(lengths)]
    has = data.draw(st.lists(st.booleans(), min_size=len(samples), max_size=len(samples)))
    for mark, (each, length) in enumerate(zip(samples, lengths, strict=True)):
        if has[mark]:
            whole = np.stack([np.full(length, mark + 1), np.arange(1, length + 1)], 1)[:, None]
            cut = data.draw(st.integers(0, length))
            each.sample.routed_experts = [whole[:cut].astype(np.uint8), whole[cut:].astype(np.uint16)]
    rows = [row for rank in pack(samples, seq_len=seq_len, num_ranks=2).ranks for row in rank]
    assert any(has) or all(row.routed_experts is None for row in rows)
    for row in rows:
        marks = row.input_ids
        routed = np.zeros((row.num_tokens, 1, 2)) if row.routed_experts is None else row.routed_experts
        expected = np.stack([marks + 1, row.position_ids + 1], 1) * np.array(has)[marks][:, None]
        if row.loss_mask.any():
            np.testing.assert_array_equal(routed[:, 0], expected)


def test_rows_of_one_micro_step_cost_alike():
    rng = np.random.default_rng(0)
    lengths = np.minimum(np.exp(rng.normal(np.log(3500), 0.9, 2048)).astype(np.int64) + 1, 32_768)
    rows = assign_rows(lengths, 32_768, 16)
    costs = cost_of(lengths)
    row_costs = [float(costs[row].sum()) for row in rows]
    index = {id(row): cost for row, cost in zip(rows, row_costs, strict=True)}
    ranks = deal_rows(rows, row_costs, 16)
    lock_step = sum(max(index[id(rank[step])] for rank in ranks) for step in range(len(ranks[0])))
    assert sum(row_costs) / (16 * lock_step) > 0.97


# -- costs and rows --------------------------------------------------------------------------------


def test_attention_costs_as_much_as_matrices_at_16k_tokens():
    assert cost_of(np.array([0, 1024, 16_384, 32_768])).tolist() == [0, 1088, 32_768, 98_304]


def test_every_rank_has_a_row_even_without_samples():
    assert assign_rows(np.array([], np.int64), CAP, 3) == [[], [], []]


def test_the_number_of_rows_is_what_the_tokens_need_for_every_rank():
    for count, ranks, rows in ((1, 1, 1), (4, 1, 1), (5, 1, 2), (5, 2, 2), (9, 2, 4), (9, 3, 3)):
        assert len(assign_rows(np.full(count, CAP // 4), CAP, ranks)) == rows


def test_samples_go_longest_first_to_the_cheapest_row():
    lengths = np.array([2, 30, 20, 10, 9])
    rows = assign_rows(lengths, CAP, 2)
    assert sorted(lengths[row].tolist() for row in rows) == [[20, 10, 9], [30, 2]]


def test_a_row_without_room_for_a_long_sample_takes_a_short_one_later():
    """The row of many short samples is cheap but full: it has no room for the last 6000 tokens, but for 2000."""
    lengths = np.array([20_000, 6000, 6000, 6000, 6000, 6000, 6000, 2000])
    rows = assign_rows(lengths, 32_768, 2)
    assert sorted(lengths[row].tolist() for row in rows) == [[6000] * 5 + [2000], [20_000, 6000]]


@pytest.mark.parametrize(
    "lengths",
    [
        (
            *(66, 34, 11, 58, 59, 10, 1, 44, 27, 78, 7, 61, 59, 57, 51, 27, 36, 31, 80, 66, 70, 41, 49, 11),
            *(73, 76, 17, 25, 61, 65, 23, 60, 28, 80, 38, 53, 42),
        ),
        (
            *(3, 31, 16, 6, 47, 4, 35, 9, 10, 3, 24, 47, 43, 35, 13, 41, 34, 10, 28, 29, 26, 49, 49, 25),
            *(41, 44, 10, 8),
        ),
    ],
)
def test_samples_that_leave_almost_no_room_take_the_fewest_rows(lengths):
    """Here, the long samples must go into the fullest rows: above a quarter and above a sixteenth of the cap."""
    assert len(assign_rows(np.array(lengths), 240, 1)) == -(-sum(lengths) // 240)


def test_a_micro_step_is_spread_over_its_rows_only_where_that_makes_the_costliest_cheaper():
    def spread(rows: list[list[int]], sizes: list[int], ranks: int) -> list[list[int]]:
        return [sorted(sizes[index] for index in row) for row in _even_out(rows, sizes, sizes, CAP, ranks)]

    assert sorted(spread([[0, 1], [2]], [10, 10, 2], 2)) == [[2, 10], [10]]
    assert spread([[0, 1], [2, 3, 4]], [30, 30, 20, 20, 20], 2) == [[30, 30], [20, 20, 20]]  # LPT: 70 and 50
    # costliest first; each micro-step by itself
    assert sorted(map(sum, spread([[0], [1, 2], [3, 4], [5]], [1, 30, 20, 30, 10, 3], 2))) == [1, 3, 40, 50]


def test_rows_are_dealt_in_the_order_of_cost_and_back():
    rows = [[index] for index in range(6)]
    costs = [3.0, 6.0, 1.0, 5.0, 2.0, 4.0]
    assert deal_rows(rows, costs, 2) == [[[1], [0], [4]], [[3], [5], [2]]]
    assert deal_rows(rows, costs, 3) == [[[1], [2]], [[3], [4]], [[5], [0]]]


# -- what a packed batch reports and contains ------------------------------------------------------


def test_fill_is_the_share_of_useful_tokens():
    assert pack([sample_of(16, 0)], seq_len=CAP, num_ranks=2).fill == 16 / (2 * CAP)
    assert pack([sample_of(2 * CAP, 0), sample_of(CAP, 1)], seq_len=CAP, num_ranks=1).fill == 1.0


def test_a_batch_without_a_trained_token_is_one_dummy_row_for_each_rank():
    packed = pack([sample_of(10, 0, prompt=10), sample_of(CAP + 1, 1, prompt=CAP)], seq_len=CAP, num_ranks=3)
    assert [len(rank) for rank in packed.ranks] == [1, 1, 1]
    assert (packed.num_untrainable, packed.num_truncated) == (2, 1)
    assert (packed.num_dummies, packed.fill) == (3, 0.0)
    assert not any(row.loss_mask.any() for rank in packed.ranks for row in rank)


def test_targets_of_single_samples_are_zero_for_the_others_of_their_row():
    samples = [sample_of(4, mark) for mark in range(3)]
    samples[1].ce_weights = np.array([0, 0.5, 0.5, 0.5], np.float32)
    samples[2].ref_logprobs = np.array([0, -1, -2, -3], np.float32)
    samples[2].rl_weight, samples[2].ref_kl_weight = 0.25, 0.75
    (row,) = pack(samples, seq_len=CAP, num_ranks=1).ranks[0]
    assert row.ce_weights is not None and row.ref_logprobs is not None
    of = {int(row.input_ids[4 * place]): slice(4 * place, 4 * place + 4) for place in range(3)}
    for mark in range(3):
        has_ce, has_ref = mark == 1, mark == 2
        assert row.ce_weights[of[mark]].tolist() == ([0, 0.5, 0.5, 0.5] if has_ce else [0] * 4)
        assert row.ref_logprobs[of[mark]].tolist() == ([0, -1, -2, -3] if has_ref else [0] * 4)
    assert sorted(zip(row.rl_weights, row.ref_kl_weights, strict=True)) == [(0.25, 0.75), (1, 0), (1, 0)]
    (plain,) = pack([sample_of(4, 0)], seq_len=CAP, num_ranks=1).ranks[0]
    assert plain.ce_weights is None and plain.ref_logprobs is None


def test_a_truncated_sample_keeps_the_targets_of_its_first_tokens():
    long = sample_of(10, 0)
    long.ce_weights = np.arange(10, dtype=np.float32)
    (row,) = pack([long], seq_len=6, num_ranks=1).ranks[0]
    assert row.ce_weights is not None and row.ce_weights.tolist() == [0, 1, 2, 3, 4, 5]


def picture_at(start: int) -> PlacedPicture:
    pixels = np.zeros((4, 2), np.float32)
    return PlacedPicture(Picture("key", pixels, (1, 2, 2)), start, length=2)


def test_images_keep_their_place_in_rows_of_their_own():
    with_images = [sample_of(10, mark) for mark in range(2)]
    for each, start in zip(with_images, (2, 5), strict=True):
        each.sample.images = (picture_at(start),)
    packed = pack([*with_images, sample_of(10, 2)], seq_len=CAP, num_ranks=1)
    text, images = packed.ranks[0]
    assert set(text.input_ids.tolist()) == {2} and text.images == ()
    assert packed.fill == 30 / (2 * CAP) and packed.num_dummies == 0
    starts = {int(images.input_ids[placed.start]): placed.start % 10 for placed in images.images}
    assert starts == {0: 2, 1: 5}


def test_an_image_behind_the_end_of_a_row_is_dropped_with_its_tokens():
    sample = sample_of(10, 0)
    sample.sample.images = (picture_at(1), picture_at(8))
    (row,) = pack([sample], seq_len=8, num_ranks=1).ranks[0]
    assert [placed.start for placed in row.images] == [1]
