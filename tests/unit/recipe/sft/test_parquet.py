"""Rows of Parquet files are decoded by row group, and the order of an epoch decodes each group about once."""

import os

import pyarrow
import pyarrow.parquet
import pytest

from primerl_hpc.common.errors import DataError
from primerl_hpc.recipe.schema.sft import SFTData
from primerl_hpc.recipe.sft.arrow import ParquetRows, RowGroupCache
from primerl_hpc.recipe.sft.tables import ConcatenatedRows, LimitedRows, blocks_of, open_rows

NUM_ROWS, GROUP = 30_000, 500


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file below 1 MiB with 30,000 rows that have 50 MiB of text, in 60 row groups."""
    path = tmp_path_factory.mktemp("rows") / "a.parquet"
    text = "x" * 1800
    table = pyarrow.table({"prompt": [str(row) for row in range(NUM_ROWS)], "completion": [text] * NUM_ROWS})
    pyarrow.parquet.write_table(table, path, row_group_size=GROUP)
    assert path.stat().st_size < 2**20 and table.nbytes > 50 * 2**20
    return path


def test_one_row_decodes_one_row_group(path):
    before = pyarrow.total_allocated_bytes()
    rows = ParquetRows(path, RowGroupCache())
    row = rows[12_345]
    assert row.values["prompt"] == "12345" and row.location == f"{path}:12346"
    assert pyarrow.total_allocated_bytes() - before < 3 * 2**20
    assert [rows[index].values["prompt"] for index in (0, NUM_ROWS - 1, -1)] == ["0", "29999", "29999"]
    with pytest.raises(IndexError):
        rows[NUM_ROWS]


def test_the_cache_keeps_the_last_groups_within_its_bytes(path):
    reads = []
    cache = RowGroupCache(max_bytes=300)

    def get(number: int) -> None:
        cache.get((path, number), lambda: reads.append(number) or pyarrow.table({"a": [0] * 12}))  # 96 bytes

    for number in (0, 1, 2, 0, 3, 0, 2, 1):
        get(number)
    assert reads == [0, 1, 2, 3, 1]
    reads.clear()
    cache.max_bytes = 0
    for number in (1, 2, 1, 2, 3, 2, 1):
        get(number)
    assert reads == [3, 1]  # two groups are kept however large they are


def test_blocks_of_a_folder_and_of_a_limited_source_have_all_its_rows(path, tmp_path):
    (tmp_path / "b.jsonl").write_text('{"prompt": "p", "completion": "c"}\n' * 1500)
    jsonl = open_rows(SFTData(path=str(tmp_path / "b.jsonl")))
    parquet = ParquetRows(path)
    assert blocks_of(jsonl) == () and blocks_of(ConcatenatedRows([jsonl, jsonl])) == ()
    assert blocks_of(ConcatenatedRows([jsonl, parquet])) == (1024, 476, *[GROUP] * 60)
    assert blocks_of(LimitedRows(parquet, 1200)) == (500, 500, 200)
    assert blocks_of(LimitedRows(parquet, 1000)) == (500, 500)


def test_a_file_that_changes_or_is_damaged_is_an_error_with_its_name(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"prompt": [f"{row:05}" for row in range(9999)]})
    pyarrow.parquet.write_table(table, path, row_group_size=1000)
    rows = ParquetRows(path, RowGroupCache())
    os.utime(path, (0, 0))
    assert rows[0].values == {"prompt": "00000"}
    with path.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(DataError, match=r"a\.parquet: the file changed after the run opened it"):
        rows[5000]
    with pytest.raises(DataError, match=r"a\.parquet: cannot read the Parquet file \("):
        ParquetRows(path)
