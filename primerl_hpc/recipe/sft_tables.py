"""Where supervised rows come from: JSONL and Parquet files, saved datasets, the hub. Rows are read when they are asked for.

JSONL keeps the columns that only some rows have; its lines are found once and parsed one by one, so a file may be larger
than the memory.
"""

from __future__ import annotations

import bisect
import itertools
import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from primerl_hpc.common.errors import DataError, NotFoundError
from primerl_hpc.recipe.hub import SUFFIXES, is_hub_id
from primerl_hpc.recipe.sft_rows import Row
from primerl_hpc.recipe.sft_schema import SFTData


class Rows(Protocol):
    """Rows by number, from 0."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Row: ...


def open_rows(config: SFTData) -> Rows:
    """The rows of one source, in order of files and lines, the first ``num_rows`` of them.

    Raises NotFoundError when the path leads nowhere, DataError when there is no row or a file is of another kind.
    """
    path = Path(config.path).expanduser()
    if path.exists():
        rows = _open_path(path, config)
    elif is_on_hub(config):
        rows = _open_hub(config)
    else:
        raise NotFoundError("no such SFT data", place=config.path)
    if not len(rows):
        raise DataError(
            "no SFT rows", place=config.path, mend="give a .jsonl or .parquet file, or a folder of them"
        )
    return First(rows, config.num_rows) if config.num_rows else rows


def is_on_hub(config: SFTData) -> bool:
    """Whether the path is a hub dataset id."""
    return is_hub_id(config.path) and not Path(config.path).exists()


def _open_path(path: Path, config: SFTData) -> Rows:
    if path.is_file():
        return _open_file(path)
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        import datasets

        saved = datasets.load_from_disk(str(path))
        return TableRows(str(path), saved[config.split] if isinstance(saved, datasets.DatasetDict) else saved)
    return Chain([_open_file(file) for file in data_files(path)])


def data_files(folder: Path) -> list[Path]:
    """Every .jsonl and .parquet file below a folder, in order of names."""
    return sorted(each for each in folder.rglob("*") if each.suffix in SUFFIXES)


def _open_file(path: Path) -> Rows:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            return ArrowRows(str(path), pyarrow.parquet.read_table(path, memory_map=True))
        except (pyarrow.ArrowException, OSError) as error:
            why = " ".join(str(error).split())
            raise DataError(f"not a Parquet file that can be read ({why})", place=str(path)) from error
    if path.suffix == ".jsonl":
        return JsonlRows(path)
    raise DataError("SFT data must be .jsonl or .parquet", place=str(path))


def _open_hub(config: SFTData) -> Rows:
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    missing = (datasets.exceptions.DatasetNotFoundError, HfHubHTTPError, ConnectionError, ValueError)
    try:
        table = datasets.load_dataset(config.path, config.subset, split=config.split)
    except missing as error:
        why = " ".join(str(error).split())
        raise NotFoundError(f"no dataset '{config.path}' here or on the hub ({why})") from error
    return TableRows(config.path, table)


class JsonlRows:
    """A JSONL file; blank lines are no rows. Raises DataError naming the line that is no JSON object."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[int] = []  # 1-based
        self.starts: list[int] = []  # bytes
        at = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self.lines.append(number)
                    self.starts.append(at)
                at += len(line)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if at else b""

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Row:
        start = self.starts[index]
        end = self._map.find(b"\n", start)
        line = self._map[start : end if end >= 0 else len(self._map)]
        return parse_line(f"{self.path}:{self.lines[index]}", line)


def parse_line(place: str, line: bytes) -> Row:
    try:
        values = json.loads(line)
    except ValueError as error:  # bad JSON, or bytes that are no UTF-8
        raise DataError(f"not valid JSON ({error})", place=place) from error
    if not isinstance(values, dict):
        raise DataError("a row must be a JSON object", place=place)
    return Row(place, values)


def first_jsonl_rows(path: Path, count: int) -> Iterator[Row]:
    """Without looking at the rest of the file."""
    with path.open("rb") as file:
        numbered = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        for number, line in itertools.islice(numbered, count):
            yield parse_line(f"{path}:{number}", line)


class ArrowRows:
    """A Parquet file as an Arrow table."""

    def __init__(self, place: str, table: Any) -> None:
        self.place, self.table = place, table

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, index: int) -> Row:
        return Row(f"{self.place}:{index + 1}", self.table.slice(index, 1).to_pylist()[0])


class TableRows:
    """A dataset of package ``datasets``, memory-mapped by it."""

    def __init__(self, place: str, table: Any) -> None:
        self.place, self.table = place, table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Row:
        return Row(f"{self.place}:{index + 1}", self.table[index])


class First:
    """The first ``count`` rows."""

    def __init__(self, rows: Rows, count: int) -> None:
        self.rows, self.count = rows, min(count, len(rows))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]


class Chain:
    """Several tables as one, in order."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts = parts
        self.ends = list(itertools.accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: int) -> Row:
        part = bisect.bisect_right(self.ends, index)
        return self.parts[part][index - (self.ends[part - 1] if part else 0)]
