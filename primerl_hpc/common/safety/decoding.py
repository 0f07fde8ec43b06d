"""Decode untrusted data. Malformed data raises only DataError, and memory use is limited to the declared size.

with decoding("not a complete queue", location=path, more=(SafetensorError,)):
    rows = parse_json(text)["rows"]          # KeyError, TypeError, deep nesting, …: DataError
"""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import DataError

MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    StopIteration,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)
"""Exceptions raised by Python for data of an unexpected shape or type."""


@contextlib.contextmanager
def decoding(what: str, *, location: Path | str, more: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Convert errors about the data, and those of ``more``, to DataError: ``location: what (cause)``."""
    try:
        yield
    except (*MALFORMED, *more) as error:
        cause = " ".join(str(error).split())[:300]
        raise DataError(f"{what} ({type(error).__name__}: {cause})", location=str(location)) from error


def parse_json(text: str | bytes | bytearray) -> Any:
    """Parse JSON. Raises ValueError, also for text that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def file_entries(value: Any) -> list[dict[str, Any]]:
    """Validate a manifest's list of files, each ``{"name", "size_bytes", "crc32"}``. Raises ValueError.

    `files.listed_file` checks the names when they are converted to paths.
    """
    if not isinstance(value, list):
        raise ValueError("the list of files is not a list")
    for entry in value:
        if not isinstance(entry, dict):
            raise ValueError(f"an entry of the list of files is {entry!r:.80}")
        name = entry.get("name")
        if not isinstance(name, str):
            raise ValueError(f"{name!r:.80} is not the name of a file")
        if not is_count(entry.get("size_bytes")) or not is_count(entry.get("crc32")):
            raise ValueError(f"size_bytes and crc32 of {name!r:.80} must be integers of at least 0")
    return value


def is_count(value: Any) -> bool:
    """True for a non-negative integer; False for a boolean."""
    return type(value) is int and value >= 0


def is_number(value: Any) -> bool:
    """True for an integer or a float; False for a boolean."""
    return type(value) in (int, float)
