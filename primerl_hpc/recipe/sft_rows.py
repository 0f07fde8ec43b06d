"""Rows of supervised data and the conversation each one holds. Read by the trainer, and by `resolve` before a run starts.

JSONL is read line by line, so columns that only some rows have are kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import DataError, NotFoundError
from primerl_hpc.recipe.training_schema import SFTData

SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Row:
    place: str  # file:row, 1-based, for messages
    values: dict[str, Any]


def load_rows(config: SFTData) -> list[Row]:
    """All rows, in order of files and lines.

    Raises NotFoundError when the path leads nowhere, DataError when a line is no JSON object or there is no row.
    """
    path = Path(config.path).expanduser()
    if path.exists():
        rows = list(read_rows(path))
    elif path.is_absolute() or path.suffix in SUFFIXES or config.path.startswith("."):
        raise NotFoundError("no such SFT data", place=config.path)
    else:
        rows = _read_hub(config)
    if not rows:
        raise DataError(
            "no SFT rows", place=config.path, mend="give a .jsonl or .parquet file, or a folder of them"
        )
    return rows[: config.num_rows] if config.num_rows else rows


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of a file, or of every .jsonl and .parquet below a folder, in order of names."""
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES)
    for file in files:
        yield from _read_file(file)


def _read_file(path: Path) -> Iterator[Row]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        for number, values in enumerate(pyarrow.parquet.read_table(path).to_pylist(), start=1):
            yield Row(f"{path}:{number}", values)
        return
    if path.suffix != ".jsonl":
        raise DataError("SFT data must be .jsonl or .parquet", place=str(path))
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"not valid JSON ({error})", place=f"{path}:{number}") from error
            if not isinstance(values, dict):
                raise DataError("a row must be a JSON object", place=f"{path}:{number}")
            yield Row(f"{path}:{number}", values)


def _read_hub(config: SFTData) -> list[Row]:
    import datasets

    try:
        table = datasets.load_dataset(config.path, config.subset, split=config.split)
    except (datasets.exceptions.DatasetNotFoundError, ConnectionError, ValueError) as error:
        raise NotFoundError(f"no dataset '{config.path}' here or on the hub ({error})") from error
    return [Row(f"{config.path}:{number}", values) for number, values in enumerate(table, start=1)]


def row_messages(row: Row) -> list[dict[str, Any]]:
    """The conversation of a row: ``messages``, else ``prompt`` + ``completion`` (each text or messages).

    Raises DataError naming file, row and the missing column.
    """
    if row.values.get("messages"):
        return _as_messages(row, "messages", role="")
    for column in ("prompt", "completion"):
        if row.values.get(column) is None:
            raise DataError(f"column '{column}' is missing, and so is 'messages'", place=row.place)
    return _as_messages(row, "prompt", role="user") + _as_messages(row, "completion", role="assistant")


def _as_messages(row: Row, column: str, *, role: str) -> list[dict[str, Any]]:
    value = row.values[column]
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    is_list = isinstance(value, list) and all(isinstance(each, dict) and "role" in each for each in value)
    if not is_list:
        raise DataError(f"column '{column}' must hold {'text or ' if role else ''}messages", place=row.place)
    return [{key: each for key, each in message.items() if each is not None} for message in value]
