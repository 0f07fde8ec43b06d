"""Write this package with its compiled modules into one file, from which Python imports it.

    write_package({"primerl_hpc/__init__.py": Path(...), ...}, Path("code/1/primerl_hpc.zip"))

An import from a folder costs several operations of the shared filesystem for each module and rank, and a copy costs one
file of the user's quota for each module. A zip file is opened once by each process. It contains sources, so that
tracebacks show their lines.
"""

from __future__ import annotations

import contextlib
import importlib.util
import marshal
import os
import py_compile
import struct
import sys
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import CodeType

_RACY_S = 1
"""Python compares times in seconds. If source and compiled form have almost the same, the source may have changed
between them."""
_UNCHECKED = struct.pack("<I", 0b01) + bytes(8)
"""PEP 552: compiled from the source in the same file, which never changes."""


def write_package(files: Mapping[str, Path], target: Path) -> None:
    """Write ``files`` (name in the zip file → source) and their compiled modules, readable for their owner only.

    What Python has compiled for a source is used if it is valid. A module that cannot be compiled is written without:
    Python reports it where it is imported. Raises OSError.
    """
    try:
        _write(files, target)
    except OSError as error:
        error.filename = error.filename or str(target)
        raise


def _write(files: Mapping[str, Path], target: Path) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file, zipfile.ZipFile(file, "w") as package, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler
        for name, source in files.items():
            before = source.stat()
            content = source.read_bytes()
            package.writestr(zipfile.ZipInfo(name), content)
            if name.endswith(".py") and (code := _compile(source, content, before)) is not None:
                data = importlib.util.MAGIC_NUMBER + _UNCHECKED + marshal.dumps(_at(code, f"{target}/{name}"))
                package.writestr(zipfile.ZipInfo(f"{name}c"), data)


def _compile(source: Path, content: bytes, before: os.stat_result) -> CodeType | None:
    """Return the code of a module; None if it cannot be compiled. ``before``: its status before it was read."""
    if (code := _compiled_form(source, before)) is not None:
        return code
    if not sys.dont_write_bytecode:  # as an import does, so that the next submission need not compile
        with contextlib.suppress(OSError, py_compile.PyCompileError):
            py_compile.compile(str(source), doraise=True)
            if (code := _compiled_form(source, before)) is not None:
                return code
    try:
        return compile(content, str(source), "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None


def _compiled_form(source: Path, before: os.stat_result) -> CodeType | None:
    """Return the code that Python's cache has for ``source``; None if it may be that of another content."""
    try:
        path = Path(importlib.util.cache_from_source(str(source)))
        content, written, after = path.read_bytes(), path.stat(), source.stat()
    except (OSError, NotImplementedError):
        return None
    is_same = (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
    is_valid = content[:16] == _header(after)
    if not is_same or not is_valid or written.st_mtime <= after.st_mtime + _RACY_S:
        return None
    try:
        return marshal.loads(content[16:])
    except (EOFError, ValueError, TypeError):  # half written
        return None


def _header(source: os.stat_result) -> bytes:
    """PEP 552: magic number, flags 0 (compare the time), time and size of the source."""
    facts = struct.pack("<II", int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)
    return importlib.util.MAGIC_NUMBER + bytes(4) + facts


def _at(code: CodeType, path: str) -> CodeType:
    """Return the code with ``path`` as its file, which tracebacks and profilers show."""
    constants = tuple(_at(value, path) if isinstance(value, CodeType) else value for value in code.co_consts)
    return code.replace(co_filename=path, co_consts=constants)
