"""Put compiled modules into a copy of the code.

Without them, each process of a run would compile and write what it imports while all others do the same: 130 modules of
a trainer's rank, 130,000 files on 1,024 ranks, in one folder tree of a shared filesystem.
"""

from __future__ import annotations

import importlib.util
import marshal
import os
import struct
import sys
from pathlib import Path

_RACY_S = 1
"""Python compares times in seconds. If source and compiled form have almost the same, the source may have changed
between them."""


def compile_copy(source: Path, target: Path, before: os.stat_result) -> None:
    """Write the compiled form of ``target``, a copy of ``source``, for interpreters of this one's version.

    ``before``: of the source before it was copied. What Python has compiled for the source is used if it is valid. A
    module that cannot be compiled is left alone: Python reports it where it is imported. Raises OSError.
    """
    code = _compiled_form(source, before)
    if code is None:
        try:
            code = marshal.dumps(compile(target.read_bytes(), str(target), "exec", dont_inherit=True))
        except (SyntaxError, ValueError):
            return
    compiled = target.parent / "__pycache__" / f"{target.stem}.{sys.implementation.cache_tag}.pyc"
    compiled.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        compiled.write_bytes(_header(target.stat()) + code)
    except OSError as error:
        error.filename = str(compiled)
        raise
    compiled.chmod(0o600)


def _compiled_form(source: Path, before: os.stat_result) -> bytes | None:
    """Return the code that Python's cache has for ``source``; None if it may be that of another content."""
    try:
        path = Path(importlib.util.cache_from_source(str(source)))
        content, written, after = path.read_bytes(), path.stat(), source.stat()
    except (OSError, NotImplementedError):
        return None
    is_same = (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
    is_valid = content[:16] == _header(after)
    return content[16:] if is_same and is_valid and written.st_mtime > after.st_mtime + _RACY_S else None


def _header(source: os.stat_result) -> bytes:
    """PEP 552: magic number, flags 0 (compare the time), time and size of the source."""
    facts = struct.pack("<II", int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)
    return importlib.util.MAGIC_NUMBER + bytes(4) + facts
