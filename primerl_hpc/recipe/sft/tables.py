"""Sources of supervised rows: JSONL and Parquet files, saved datasets, the hub. Rows are read on access.

JSONL files may have columns that only some rows have. Their lines are located once and parsed one by one, so a file may
be larger than memory.
"""

from __future__ import annotations

import bisect
import importlib.util
import itertools
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from primerl_hpc.common.errors import DataError, NotFoundError
from primerl_hpc.common.locks import no_locks_error
from primerl_hpc.common.safety.decoding import parse_json
from primerl_hpc.recipe.hub import is_hub_id
from primerl_hpc.recipe.schema.sft import SFTData
from primerl_hpc.recipe.sft.arrow import ParquetRows, TableRows
from primerl_hpc.recipe.sft.folders import data_files
from primerl_hpc.recipe.sft.rows import Row

EVEN_BLOCK = 1024


class Rows(Protocol):
    """Rows by index, counted from 0."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Row: ...


def blocks_of(rows: Rows) -> tuple[int, ...]:
    """Return the numbers of consecutive rows that are decoded together; empty if any row can be read by itself."""
    return getattr(rows, "blocks", ())


def open_rows(config: SFTData) -> Rows:
    """Return the rows of a source in the order of files and lines, limited to the first ``num_rows``.

    Raises NotFoundError if the path does not exist, DataError if there are no rows or a file has another format.
    """
    path = Path(config.path).expanduser()
    if path.exists():
        rows = _open_path(path, config)
    elif is_on_hub(config):
        rows = _open_hub(config)
    else:
        raise NotFoundError(
            "this SFT dataset does not exist",
            location=config.path,
            hint="give a file, a folder, or a hub id (owner/name)",
        )
    if not len(rows):
        raise DataError(
            "there are no SFT rows",
            location=config.path,
            hint="give a .jsonl or .parquet file, or a folder of them",
        )
    return LimitedRows(rows, config.num_rows) if config.num_rows else rows


def is_on_hub(config: SFTData) -> bool:
    """True if the path is a hub dataset id."""
    return is_hub_id(config.path) and not Path(config.path).exists()


def _open_path(path: Path, config: SFTData) -> Rows:
    if path.is_file():
        return _open_file(path)
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        import datasets

        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.DatasetDict):
            if config.named_split not in saved:
                raise DataError(
                    f"the dataset has no split '{config.named_split}', it has {', '.join(map(str, saved))}",
                    location=str(path),
                    hint="set split of this source to one of them",
                )
            saved = saved[config.named_split]
        return TableRows(str(path), saved)
    return ConcatenatedRows([_open_file(file) for file in data_files(path, config.split)])


def _open_file(path: Path) -> Rows:
    if path.suffix == ".parquet":
        return ParquetRows(path)
    if path.suffix == ".jsonl":
        return JsonlRows(path)
    raise DataError("SFT data must be a .jsonl or .parquet file", location=str(path))


def _open_hub(config: SFTData) -> Rows:
    import datasets
    from datasets.config import HF_DATASETS_CACHE
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import HfHubHTTPError

    missing = (DatasetNotFoundError, HfHubHTTPError, ConnectionError, ValueError)
    try:
        table = datasets.load_dataset(config.path, config.subset, split=config.named_split)
    except missing as error:
        why = " ".join(str(error).split())
        raise NotFoundError(
            f"dataset '{config.path}' exists neither here nor on the hub ({why})",
            hint="check its name, subset and split, or give a file or folder",
        ) from error
    except OSError as error:
        caches = {"HF_DATASETS_CACHE": Path(HF_DATASETS_CACHE), "HF_HUB_CACHE": Path(HF_HUB_CACHE)}
        if (no_locks := no_locks_error(error, "datasets", caches)) is None:
            raise
        raise no_locks from error
    return TableRows(config.path, table)


class JsonlRows:
    """The rows of a JSONL file; blank lines are skipped.

    Access raises DataError for a line that is not a JSON object, and if the file was written over in the meantime: a
    memory map of a file that became shorter would end the process with SIGBUS. Rows may be appended to the file; they
    are not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = array("Q")  # line numbers, from 1
        self.starts = array("Q")  # byte offsets
        offset = 0
        line = b""
        self._file = path.open("rb", buffering=0)
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self.lines.append(number)
                    self.starts.append(offset)
                offset += len(line)
        self._end, self._has_last_newline = offset, line.endswith(b"\n")

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Row:
        index = range(len(self.starts))[index]
        start, location = self.starts[index], f"{self.path}:{self.lines[index]}"
        is_last = index + 1 == len(self.starts)
        end = self._end if is_last else self.starts[index + 1]
        before = min(start, 1)  # the end of the previous line
        data = os.pread(self._file.fileno(), before + end - start, start - before)
        line = data[before:]
        is_line = line.endswith(b"\n") or (is_last and not self._has_last_newline)
        if len(line) < end - start or data[:before] not in (b"", b"\n") or not is_line:
            raise DataError(
                "the file changed after the run opened it",
                location=location,
                hint="restore the file and resume the run",
            )
        return parse_line(location, line)


def parse_line(location: str, line: bytes) -> Row:
    """Return the row in a line of JSON. Raises DataError."""
    try:
        values = parse_json(line)
    except ValueError as error:  # invalid JSON, or invalid UTF-8
        raise DataError(f"not valid JSON ({error})", location=location) from error
    if not isinstance(values, dict):
        raise DataError("a row must be a JSON object", location=location)
    return Row(location, values)


def first_jsonl_rows(path: Path, count: int) -> Iterator[Row]:
    """Yield the first ``count`` rows without reading the rest of the file."""
    with path.open("rb") as file:
        numbered = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        for number, line in itertools.islice(numbered, count):
            yield parse_line(f"{path}:{number}", line)


def first_rows(path: Path, count: int, split: str | None = None) -> Iterator[Row]:
    """Yield the first ``count`` rows of a file, or of a folder's ``split``, without reading the rest.

    Parquet files are skipped if pyarrow is not installed, as on many login nodes. Raises DataError as `data_files`.
    """
    files = data_files(path, split) if path.is_dir() else [path]
    return itertools.islice(
        itertools.chain.from_iterable(_first_of_file(file, count) for file in files), count
    )


def _first_of_file(path: Path, count: int) -> Iterator[Row]:
    if path.suffix == ".jsonl":
        yield from first_jsonl_rows(path, count)
    elif importlib.util.find_spec("pyarrow") is not None:
        rows = _open_file(path)
        yield from (rows[index] for index in range(min(count, len(rows))))


class LimitedRows:
    """The first ``count`` rows of other rows."""

    def __init__(self, rows: Rows, count: int) -> None:
        self.rows, self.count = rows, min(count, len(rows))
        starts = itertools.accumulate(blocks_of(rows), initial=0)
        lengths = (
            min(size, self.count - start) for start, size in zip(starts, blocks_of(rows), strict=False)
        )
        self.blocks = tuple(length for length in lengths if length > 0)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]


class ConcatenatedRows:
    """The rows of several sources, one after another."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts = parts
        self.ends = list(itertools.accumulate(len(part) for part in parts))
        self.blocks: tuple[int, ...] = ()
        if any(blocks_of(part) for part in parts):
            self.blocks = tuple(size for part in parts for size in blocks_of(part) or _even_blocks(len(part)))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: int) -> Row:
        part = bisect.bisect_right(self.ends, index)
        return self.parts[part][index - (self.ends[part - 1] if part else 0)]


def _even_blocks(count: int) -> list[int]:
    """Divide rows that can be read one by one into blocks, so that they mix with the row groups of other files."""
    return [min(EVEN_BLOCK, count - start) for start in range(0, count, EVEN_BLOCK)]
