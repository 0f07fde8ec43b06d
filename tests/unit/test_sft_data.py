"""Supervised data: what is trained, what is refused, and that a position alone decides the next batch."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl_hpc.common.errors import DataError, NotFoundError
from primerl_hpc.recipe.sft_rows import Row, load_rows, row_messages
from primerl_hpc.recipe.training_schema import SFT, LossMask, SFTData
from primerl_hpc.trainer.sft_data import (
    Peers,
    Sample,
    SFTStream,
    Tokenizer,
    pack_best_fit,
)
from tests.support import make_tiny_model


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    pytest.importorskip("torch")
    from transformers import AutoTokenizer

    from primerl_hpc.common.chatml import ChatMLRenderer

    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), rows=1, hidden=32, layers=1)
    return ChatMLRenderer(AutoTokenizer.from_pretrained(folder / "model"))


def rows_of(*values: dict) -> list[Row]:
    return [Row(f"data.jsonl:{number}", each) for number, each in enumerate(values, start=1)]


def demonstrations(count: int) -> list[Row]:
    return rows_of(*({"prompt": "a" * (1 + i % 7), "completion": "b" * (1 + i % 5)} for i in range(count)))


def trained_text(renderer, values: dict, mask: LossMask) -> str:
    tokenizer = Tokenizer(rows_of(values), renderer, mask, 128)
    tokenizer.prepare([0])
    sample = tokenizer[0]
    return renderer.tokenizer.decode(sample.input_ids[sample.is_trained])


def test_mixed_columns_of_jsonl_files_lose_nothing(tmp_path):
    values = [{"messages": [{"role": "user", "content": "x"}]}, {"prompt": "p", "completion": "c", "more": 1}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, values)) + "\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "q", "completion": "d"}\n')
    rows = load_rows(SFTData(path=str(tmp_path)))
    assert [row.values for row in rows] == [*values, {"prompt": "q", "completion": "d"}]
    assert len(load_rows(SFTData(path=str(tmp_path), num_rows=2))) == 2


def test_parquet_rows_are_read(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"prompt": ["p", "q"], "completion": ["c", "d"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert [row.values["completion"] for row in load_rows(SFTData(path=str(tmp_path / "a.parquet")))] == [
        "c",
        "d",
    ]


def test_bad_rows_are_named_by_file_row_and_column(tmp_path):
    with pytest.raises(DataError, match=r"data\.jsonl:1: column 'completion' is missing"):
        row_messages(rows_of({"prompt": "p"})[0])
    with pytest.raises(DataError, match=r"data\.jsonl:1: column 'messages' must hold messages"):
        row_messages(rows_of({"messages": ["x"]})[0])
    (tmp_path / "a.jsonl").write_text('{"prompt": "p"}\nno json\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not valid JSON"):
        load_rows(SFTData(path=str(tmp_path / "a.jsonl")))
    with pytest.raises(NotFoundError):
        load_rows(SFTData(path=str(tmp_path / "none.jsonl")))


def test_messages_win_over_prompt_and_completion():
    row = rows_of(
        {"messages": [{"role": "user", "content": "m", "name": None}], "prompt": "p", "completion": "c"}
    )[0]
    assert row_messages(row) == [{"role": "user", "content": "m"}]


def test_only_the_replies_and_their_stop_are_trained(renderer):
    assert trained_text(renderer, {"prompt": "ab", "completion": "ba"}, LossMask()) == "ba<|im_end|>"


def test_a_role_that_is_opted_in_has_its_text_trained(renderer):
    values = {"prompt": "ab", "completion": "ba"}
    assert trained_text(renderer, values, LossMask(user=True)) == "abba<|im_end|>"
    assert trained_text(renderer, values, LossMask(user=True, assistant=False)) == "ab"


def test_long_samples_are_cut_to_seq_len(renderer):
    tokenizer = Tokenizer(rows_of({"prompt": "a", "completion": "b" * 99}), renderer, LossMask(), 32)
    tokenizer.prepare([0])
    assert len(tokenizer[0].input_ids) == 32


def test_rows_without_a_trained_token_are_skipped_and_all_such_is_an_error(renderer):
    config = SFT(data=SFTData(path="x"), batch_unit="samples", batch_size=2, shuffle=False)
    rows = rows_of({"messages": [{"role": "user", "content": "u"}]}, {"prompt": "p", "completion": "c"})
    stream = SFTStream(Tokenizer(rows, renderer, LossMask(), 64), config, seq_len=64, seed=0)
    assert stream.next_batch()[1] == 2
    assert stream.position == 4
    stream = SFTStream(Tokenizer(rows[:1], renderer, LossMask(), 64), config, seq_len=64, seed=0)
    with pytest.raises(DataError, match="no row has a token to train on"):
        stream.next_batch()


@pytest.mark.parametrize("unit", ["rows", "samples"])
def test_a_stream_from_a_saved_position_goes_on_exactly(renderer, unit):
    config = SFT(data=SFTData(path="x"), batch_unit=unit, batch_size=3)

    def stream(position: int = 0) -> SFTStream:
        tokenizer = Tokenizer(demonstrations(11), renderer, LossMask(), 48)
        return SFTStream(tokenizer, config, seq_len=48, seed=5, position=position)

    straight = stream()
    for _ in range(4):
        straight.next_batch()
    resumed = stream(straight.position)
    for _ in range(6):
        one, other = straight.next_batch()[0], resumed.next_batch()[0]
        assert [row.input_ids.tolist() for row in one] == [row.input_ids.tolist() for row in other]
        assert unit == "samples" or len(one) == 3
        assert all(row.num_tokens <= 48 for row in one)


def test_an_epoch_gives_every_row_once_and_the_next_one_in_another_order(renderer):
    config = SFT(data=SFTData(path="x"), batch_unit="samples", batch_size=6)
    rows = rows_of(*({"prompt": letter, "completion": letter} for letter in "abcdef"))
    stream = SFTStream(Tokenizer(rows, renderer, LossMask(), 64), config, seq_len=4, seed=5)
    orders = [[stream._index(epoch * 6 + offset) for offset in range(6)] for epoch in range(3)]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def test_peers_share_the_work_and_get_the_same_samples(renderer):
    rows = demonstrations(10)
    alone = Tokenizer(rows, renderer, LossMask(), 48)
    alone.prepare(list(range(10)))
    shares = [[alone._make(row) for row in rows[rank::3]] for rank in range(3)]
    shared = Tokenizer(rows, renderer, LossMask(), 48, Peers(0, 3, lambda mine: [mine, *shares[1:]]))
    shared.prepare(list(range(10)))
    for index in range(10):
        np.testing.assert_array_equal(shared[index].input_ids, alone[index].input_ids)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
@settings(deadline=None)
def test_packing_holds_every_sample_once_and_no_row_overflows(lengths):
    samples = [
        Sample(np.full(length, number), np.ones(length, bool)) for number, length in enumerate(lengths)
    ]
    rows = pack_best_fit(samples, 20)
    assert sorted(int(sample.input_ids[0]) for row in rows for sample in row) == list(range(len(lengths)))
    assert all(sum(len(sample.input_ids) for sample in row) <= 20 for row in rows)
    assert len(rows) <= 2 * sum(lengths) / 20 + 1
