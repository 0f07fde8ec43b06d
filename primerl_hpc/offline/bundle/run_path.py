"""Where programs and shared libraries of an interpreter look for libraries, as paths that are valid in every folder.

    with_relative_run_path(data, Path("/opt/python/lib"), "$ORIGIN/../lib")

An interpreter built with ``--enable-shared`` has the path of its libraries in each of its ELF files (DT_RPATH or
DT_RUNPATH, elf(5)). In a bundle it would load the old libpython from the shared filesystem, and not start without it.
The text is replaced in place; it must not be longer than the old one.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

_MAGIC = b"\x7fELF\x02\x01"
"""64 bits, little-endian: all architectures on which runs are possible."""
_LOAD, _DYNAMIC = 1, 2
_STRINGS, _RPATH, _RUNPATH = 5, 15, 29
_ORIGIN = "$ORIGIN"


def with_relative_run_path(data: bytes, library: Path, relative: str) -> bytes:
    """Return the file with ``relative`` in place of ``library`` in its run path; unchanged if it does not name it.

    Entries of other folders stay if there is room. Returns the file unchanged if there is not even room for
    ``relative``.
    """
    found = _run_path(data)
    if found is None:
        return data
    start, end = found
    entries = os.fsdecode(data[start:end]).split(":")
    if str(library) not in (os.path.normpath(entry) for entry in entries if entry):
        return data
    replaced = [relative if os.path.normpath(entry) == str(library) else entry for entry in entries]
    text = os.fsencode(":".join(dict.fromkeys(replaced)))
    if len(text) > end - start:
        text = os.fsencode(relative)
    if len(text) > end - start:
        return data
    return data[:start] + text.ljust(end - start, b"\0") + data[end:]


def origin_path(name: str, library: str) -> str:
    """Return the run path of the file ``name`` of a bundle whose libraries are in ``library``."""
    steps = os.path.relpath(library, os.path.dirname(name))
    return _ORIGIN if steps == "." else f"{_ORIGIN}/{steps}"


def _run_path(data: bytes) -> tuple[int, int] | None:
    """Return start and end of the run path in an ELF file; None if it has none."""
    if not data.startswith(_MAGIC):
        return None
    try:
        (table,) = struct.unpack_from("<Q", data, 32)
        size, count = struct.unpack_from("<HH", data, 54)
        segments = [struct.unpack_from("<IIQQQQ", data, table + index * size) for index in range(count)]
        tags = {}
        for kind, _, offset, _, _, length in segments:
            if kind == _DYNAMIC:
                tags = dict(struct.iter_unpack("<QQ", data[offset : offset + length // 16 * 16]))
        place = tags.get(_RUNPATH, tags.get(_RPATH))
        if place is None:
            return None
        strings = tags[_STRINGS]
        base = next(
            offset + strings - address
            for kind, _, offset, address, _, length in segments
            if kind == _LOAD and address <= strings < address + length
        )
        start = base + place
        return start, data.index(b"\0", start)
    except (struct.error, KeyError, StopIteration, ValueError):  # not a file that a linker wrote
        return None
