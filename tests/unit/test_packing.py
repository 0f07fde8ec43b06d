"""Packing: nothing lost, nothing twice, no row above the cap, the same number of rows for every rank."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl_hpc.orchestrator.packing import TrainSample, assign_rows, cost_of, deal_rows, pack
from primerl_hpc.orchestrator.trajectories import Sample

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
def test_packed_streams_hold_what_the_samples_held(lengths, num_ranks, seq_len):
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
def test_chosen_experts_stay_beside_their_tokens(lengths, seq_len, data):
    """Of token t of sample m: (m + 1, t + 1); in parts, of different width, or not there at all."""
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
