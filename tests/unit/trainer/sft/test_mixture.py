"""The order of sources with blocks: every row once per epoch, few blocks at a time, the same from any position."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.recipe.schema.sft import SFT, SFTData
from primerl_hpc.recipe.sft.arrow import ParquetRows, RowGroupCache
from primerl_hpc.recipe.sft.tables import ConcatenatedRows, blocks_of, open_rows
from primerl_hpc.trainer.sft import mixture as mixture_module
from primerl_hpc.trainer.sft.mixture import Mixture
from primerl_hpc.trainer.sft.stream import SFTStream
from primerl_hpc.trainer.sft.tokens import SFTSample, shares_of


@given(
    st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=3),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_an_epoch_has_every_row_once_with_any_blocks(blocks, seed, shuffle, is_weighted):
    sizes = tuple(sum(own) or 4 for own in blocks)
    weights = tuple(1 / len(sizes) for _ in sizes) if is_weighted else None
    given_blocks = tuple(map(tuple, blocks))
    mixture = Mixture(sizes, weights, seed=seed, shuffle=shuffle, blocks=given_blocks)
    rows = mixture.order(1)
    assert set(rows) == set(range(sum(sizes)))
    assert is_weighted or len(rows) == sum(sizes)
    if not any(given_blocks) or not shuffle:
        plain = Mixture(sizes, weights, seed=seed, shuffle=shuffle)
        assert rows.tolist() == plain.order(1).tolist()


def test_an_epoch_of_row_groups_is_shuffled_and_stays_within_few_groups(monkeypatch):
    monkeypatch.setattr(mixture_module, "WINDOW_ROWS", 400)
    blocks = (100,) * 48
    rows = Mixture((4800,), seed=1, blocks=(blocks,)).order(0)
    groups = rows // 100
    windows = groups.reshape(-1, 400)
    assert all(len(set(window)) == 4 for window in windows)
    assert len({group for window in windows for group in set(window)}) == 48
    assert (np.diff(groups) != 0).mean() > 0.6  # rows of a window are mixed
    assert (np.diff(rows) == 1).sum() < 20
    assert np.abs(np.diff([window.mean() for window in windows])).mean() > 3  # windows are in random order


class Rows:
    """Samples that are row numbers; rows are read when they are prepared."""

    def __init__(self, rows) -> None:
        self.rows, self.samples = rows, {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> SFTSample:
        return self.samples[index]

    def prepare(self, indices: list[int]) -> None:
        for index in sorted(indices):
            number = int(self.rows[index].values["prompt"])
            self.samples[index] = SFTSample(np.array([number, number], np.int32), np.ones(2, np.bool_))


class CountingCache(RowGroupCache):
    num_reads = 0

    def get(self, key, read):
        def count():
            self.num_reads += 1
            return read()

        return super().get(key, count)


@pytest.mark.parametrize("group", [100, 1000, 20_000])
def test_a_stream_of_parquet_rows_decodes_each_group_about_once_and_resumes_exactly(tmp_path, group):
    table = pyarrow.table({"prompt": [str(row) for row in range(20_000)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=group)
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"prompt": str(20_000 + row)}) + "\n" for row in range(5000))
    )
    cache = CountingCache()
    sources = [ParquetRows(tmp_path / "a.parquet", cache), open_rows(SFTData(path=str(tmp_path / "b.jsonl")))]
    config = SFT(data=SFTData(path="x"), batch_unit="samples", batch_size=1000)

    def stream() -> SFTStream:
        return SFTStream(
            Rows(ConcatenatedRows(sources)),
            config,
            seq_len=64,
            seed=5,
            sizes=tuple(map(len, sources)),
            blocks=tuple(map(blocks_of, sources)),
        )

    straight = stream()
    progress, seen = {}, []
    for number in range(25):
        if number == 10:
            progress = straight.progress
        batch = straight.next_batch()
        seen.append(sorted(int(sample.input_ids[0]) for row in batch.rows for sample in row))
    assert sorted(number for numbers in seen for number in numbers) == list(range(25_000))
    assert cache.num_reads <= 1.2 * 20_000 / group + 1
    resumed = stream()
    resumed.restore(progress)
    for numbers in seen[10:13]:
        batch = resumed.next_batch()
        assert numbers == sorted(int(sample.input_ids[0]) for row in batch.rows for sample in row)


def test_peers_share_neighboring_rows():
    assert shares_of([1, 2, 5, 8, 9], 2) == [[1, 2], [5, 8, 9]]
    assert shares_of([4], 3) == [[], [], [4]]
