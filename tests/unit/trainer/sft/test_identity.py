"""Data that changes under a run: a resume notices it, and a file that is written over ends the run with an error."""

import json
import os
from pathlib import Path

import pytest

from primerl_hpc.common.errors import DataError
from primerl_hpc.recipe.schema.sft import SFT, SFTData
from primerl_hpc.recipe.sft.tables import open_rows
from primerl_hpc.trainer.sft.identity import PLACES, ROWS_PER_PLACE, check_same, describe, sampled_rows
from primerl_hpc.trainer.sft.mixture import Mixture, Order
from primerl_hpc.trainer.sft.stream import SFTStream


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": text, "completion": "c"}) + "\n" for text in texts))
    return path


def describe_file(path: Path, **fields: object) -> list[dict]:
    return describe([open_rows(SFTData.model_validate({"path": str(path), **fields}))])


TEXTS = [f"text {number}" for number in range(152)]


@pytest.mark.parametrize(
    ("texts", "cause"),
    [
        ([*TEXTS, "more"], "153 rows, 152 at the checkpoint"),
        (TEXTS[1:], "151 rows, 152 at the checkpoint"),
        (TEXTS[::-1], "of 152 rows, some have other contents or another order"),
        (["new", *TEXTS[:-1]], "of 152 rows, some have other contents or another order"),
    ],
)
def test_a_resume_with_other_rows_ends_with_a_sentence_and_an_option(tmp_path, texts, cause):
    saved = json.loads(json.dumps(describe_file(write_jsonl(tmp_path / "a.jsonl", TEXTS))))
    now = describe_file(write_jsonl(tmp_path / "a.jsonl", texts))
    with pytest.raises(DataError, match=f"a.jsonl: the data changed after the checkpoint: {cause}") as raised:
        check_same(saved, now, ["a.jsonl"], accepted=False)
    assert "--set checkpoint.accept_changed_data=true" in raised.value.hint
    assert check_same(saved, now, ["a.jsonl"], accepted=True) == f"a.jsonl: {cause}"


def test_a_copy_and_a_longer_file_with_the_same_limit_are_the_same_data(tmp_path):
    saved = describe_file(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    os.utime(tmp_path / "a.jsonl", (0, 0))
    longer = write_jsonl(tmp_path / "c.jsonl", [*TEXTS, "more"])
    for now in (describe_file(tmp_path / "a.jsonl"), describe_file(longer, num_rows=len(TEXTS))):
        assert check_same(saved, now, ["x"], accepted=False) == ""
    assert check_same(None, saved, ["x"], accepted=False) == ""  # a checkpoint of an earlier version


def test_the_same_rows_in_other_row_groups_have_another_order(tmp_path):
    import pyarrow
    import pyarrow.parquet

    saved = describe_file(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    table = pyarrow.Table.from_pylist([{"prompt": text, "completion": "c"} for text in TEXTS])
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet", row_group_size=50)
    found = describe_file(tmp_path / "b.parquet")
    assert [entry["fingerprint"] for entry in found] == [entry["fingerprint"] for entry in saved]
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet", row_group_size=60)
    for before in (saved, describe_file(tmp_path / "c.parquet")):
        with pytest.raises(DataError, match="the same rows are in other Parquet row groups"):
            check_same(before, found, ["x"], accepted=False)


@pytest.mark.parametrize("count", [1, 3, 64, 65, 1000])
def test_sampled_rows_are_spread_over_the_source_and_few(count):
    rows = sampled_rows(count)
    assert rows[0] == 0 and rows[-1] == count - 1 and len(rows) == len(set(rows))
    assert len(rows) <= PLACES * ROWS_PER_PLACE and (count > 64 or len(rows) == count)


@pytest.mark.parametrize(
    ("content", "reads_until"),
    [
        ('{"prompt": "a"}\n', 1),  # shorter: a memory map would end the process with SIGBUS
        ('{"prompt": "a"}\n{"prompt": "longer"}\n{"prompt": "c"}\n', 1),
        ('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n{"prompt": "appended"}\n', 3),
    ],
)
def test_a_file_that_is_written_over_is_an_error_and_appended_rows_are_not(tmp_path, content, reads_until):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"prompt": "{letter}"}}\n' for letter in "abc"))
    rows = open_rows(SFTData(path=str(path)))
    with path.open("r+") as file:  # the same file, as with cp and rsync --inplace
        file.truncate(0)
        file.write(content)
    assert [rows[index].values["prompt"] for index in range(reads_until)] == list("abc")[:reads_until]
    for index in range(reads_until, 3):
        with pytest.raises(
            DataError, match=rf"a\.jsonl:{index + 1}: the file changed after the run opened it"
        ):
            rows[index]


@pytest.mark.parametrize("weights", [None, (0.5, 0.5)])
def test_an_epoch_is_not_the_previous_one_of_the_next_seed(weights):
    orders = [Mixture((50, 50), weights, seed=seed).order(epoch).tolist() for seed, epoch in ((3, 1), (4, 0))]
    assert orders[0] != orders[1]


def test_a_position_of_an_earlier_version_continues_in_the_order_of_its_version():
    rows = list(range(40))
    config = SFT(data=SFTData(path="x"))
    stream = SFTStream(rows, config, seq_len=8, seed=3)  # pyright: ignore[reportArgumentType]
    new = [stream.order.row(position) for position in range(80)]
    stream.restore({"position": 45, "num_cut": 1, "num_skipped": 2})
    old = Order(Mixture((40,), seed=3, version=1))
    assert [stream.order.row(position) for position in range(80)] == [
        old.row(position) for position in range(80)
    ]
    assert stream.progress == {"order": 1, "position": 45, "num_cut": 1, "num_skipped": 2}
    stream.restore({"order": 2, "position": 45})
    assert [stream.order.row(position) for position in range(80)] == new
    stream.restore({})  # a fork that skips the data
    assert stream.position == 0 and stream.progress["order"] == 2
