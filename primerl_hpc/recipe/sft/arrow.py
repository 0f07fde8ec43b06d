"""Rows of Arrow tables: Parquet files, and datasets of package ``datasets``.

Arrow gives all mappings of a column the union of their keys. A key that a row does not have is null there, at any
depth: a call of one tool seems to have the arguments of all others. `without_filled_nulls` removes these nulls. They
cannot be distinguished from a null that the author of the row wrote, except in a list (``enum: [null, "a"]``), to which
Arrow adds nothing.

A row of a Parquet file cannot be decoded without its row group. `RowGroupCache` keeps the groups that were read last,
and `ParquetRows.blocks` lets an order of rows stay within a few groups at a time.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import DataError
from primerl_hpc.recipe.sft.rows import Row

KEPT_BYTES = 2**29
MIN_GROUPS = 2


def without_filled_nulls(value: Any, arrow_type: Any) -> Any:
    """Return a value of an Arrow type without the keys of its mappings that are null; nulls in lists remain.

    Values of other types, such as JSON, are returned as they are.
    """
    import pyarrow.types as kinds

    if isinstance(value, dict) and kinds.is_struct(arrow_type):
        types = {field.name: field.type for field in arrow_type}
        return {
            key: without_filled_nulls(item, types[key]) for key, item in value.items() if item is not None
        }
    is_list = any(
        check(arrow_type) for check in (kinds.is_list, kinds.is_large_list, kinds.is_fixed_size_list)
    )
    if isinstance(value, list) and is_list:
        return [without_filled_nulls(item, arrow_type.value_type) for item in value]
    return value


def make_row(location: str, values: dict[str, Any], schema: Any) -> Row:
    """Return a row of a table with an Arrow schema."""
    return Row(
        location,
        {
            column: without_filled_nulls(value, schema.field(column).type)
            for column, value in values.items()
            if value is not None
        },
    )


class RowGroupCache:
    """The decoded row groups that were read last, of all files of a process.

    At least `MIN_GROUPS` are kept, more while they need at most ``max_bytes`` together.
    """

    def __init__(self, max_bytes: int = KEPT_BYTES) -> None:
        self.max_bytes = max_bytes
        self._tables: OrderedDict[tuple[Path, int], Any] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: tuple[Path, int], read: Callable[[], Any]) -> Any:
        """Return the Arrow table of a row group; ``read`` decodes it."""
        if key not in self._tables:
            self._tables[key] = read()
            self._num_bytes += self._tables[key].nbytes
        self._tables.move_to_end(key)
        while len(self._tables) > MIN_GROUPS and self._num_bytes > self.max_bytes:
            self._num_bytes -= self._tables.popitem(last=False)[1].nbytes
        return self._tables[key]


_cache = RowGroupCache()


class ParquetRows:
    """The rows of a Parquet file. A row group is decoded when one of its rows is read.

    Raises DataError if the file is not Parquet; access raises it for a damaged row group, and if the file changed.
    """

    def __init__(self, path: Path, cache: RowGroupCache | None = None) -> None:
        import pyarrow.parquet

        self.path, self._groups = path, cache or _cache
        with self._errors():
            with pyarrow.parquet.ParquetFile(path) as file:
                self._metadata = file.metadata
            self._identity = self._stat()
        sizes = [self._metadata.row_group(number).num_rows for number in range(self._metadata.num_row_groups)]
        self._numbers = [number for number, size in enumerate(sizes) if size]
        self.blocks = tuple(size for size in sizes if size)
        """Rows of each row group."""
        self._ends = list(itertools.accumulate(self.blocks))

    def __len__(self) -> int:
        return self._metadata.num_rows

    def __getitem__(self, index: int) -> Row:
        index = range(len(self))[index]
        block = bisect.bisect_right(self._ends, index)
        number = self._numbers[block]
        table = self._groups.get((self.path, number), lambda: self._read(number))
        values = table.slice(index - self._ends[block] + self.blocks[block], 1).to_pylist()[0]
        return make_row(f"{self.path}:{index + 1}", values, table.schema)

    def _read(self, number: int) -> Any:
        """Decode a row group. The file is not mapped: one that became shorter would end the process with SIGBUS."""
        import pyarrow.parquet

        with self._errors():
            if self._stat() != self._identity:
                raise DataError(
                    "the file changed after the run opened it",
                    location=str(self.path),
                    hint="restore the file and resume the run",
                )
            with pyarrow.parquet.ParquetFile(self.path, metadata=self._metadata) as file:
                return file.read_row_group(number)

    def _stat(self) -> tuple[int, int]:
        status = self.path.stat()
        return status.st_size, status.st_ino  # touched files, as sites with purges have, are not changed

    @contextmanager
    def _errors(self) -> Iterator[None]:
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError) as error:
            cause = " ".join(str(error).split())
            raise DataError(f"cannot read the Parquet file ({cause})", location=str(self.path)) from error


class TableRows:
    """The rows of a dataset of package ``datasets``, which memory-maps it."""

    def __init__(self, location: str, table: Any) -> None:
        self.location, self.table = location, table
        self._schema = table.features.arrow_schema

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Row:
        return make_row(f"{self.location}:{index + 1}", self.table[index], self._schema)
