"""Compiled modules in a copy of the code: processes that import them write nothing, and no edit is missed."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from primerl_hpc.launch.code.bytecode import compile_copy

LONG_AGO = 1_700_000_000
TEXT = "VALUE = 1\ndef where(): pass\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A module that was compiled long after it was written."""
    path = tmp_path / "source" / "module.py"
    path.parent.mkdir()
    path.write_text(TEXT)
    os.utime(path, (LONG_AGO, LONG_AGO))
    py_compile.compile(str(path))
    return path


def copy(source: Path) -> Path:
    target = source.parents[1] / "copy" / source.name
    target.parent.mkdir()
    before = source.stat()
    target.write_text(source.read_text())
    compile_copy(source, target, before)
    return target


def imported(target: Path) -> str:
    """Import a module and return its value, after a check that Python compiled nothing and that tracebacks name it."""
    code = "import module; print(module.VALUE, module.where.__code__.co_filename)"
    done = subprocess.run(
        [sys.executable, "-v", "-c", code],
        env={**os.environ, "PYTHONPATH": str(target.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"matches {target}" in done.stderr, done.stderr
    value, file = done.stdout.split()
    assert file == str(target)
    return value


@pytest.mark.parametrize("is_compiled", [True, False])
def test_an_import_uses_what_was_compiled_and_writes_nothing(source: Path, is_compiled: bool) -> None:
    if not is_compiled:
        Path(cache_from_source(str(source))).unlink()
    target = copy(source)
    compiled = Path(cache_from_source(str(target)))
    before = compiled.stat()
    assert imported(target) == "1"
    assert (compiled.stat().st_ino, compiled.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert compiled.stat().st_mode & 0o077 == 0


def test_what_python_has_compiled_is_used(source: Path) -> None:
    cache = Path(cache_from_source(str(source)))
    cache.write_bytes(cache.read_bytes().replace(b"where", b"there"))
    target = copy(source)
    assert b"there" in Path(cache_from_source(str(target))).read_bytes()


def test_a_source_edited_within_a_second_is_compiled_again(source: Path) -> None:
    """The time in Python's file is that of the edited source, to the second."""
    py_compile.compile(str(source))
    cache = Path(cache_from_source(str(source)))
    source.write_text(TEXT.replace("1", "2"))
    os.utime(source, (LONG_AGO, LONG_AGO))
    os.utime(cache, (LONG_AGO + 0.5, LONG_AGO + 0.5))
    assert imported(copy(source)) == "2"


def test_a_source_edited_while_it_is_copied_does_not_change_the_copy(source: Path) -> None:
    before = source.stat()
    target = source.parents[1] / "copy" / source.name
    target.parent.mkdir()
    target.write_text(source.read_text())
    source.write_text(TEXT.replace("1", "3"))
    py_compile.compile(str(source))
    os.utime(cache_from_source(str(source)))
    compile_copy(source, target, before)
    assert imported(target) == "1"


def test_an_edit_of_the_copy_is_executed(source: Path) -> None:
    target = copy(source)
    target.write_text("VALUE = 42\n")
    code = "import module; print(module.VALUE)"
    environ = {**os.environ, "PYTHONPATH": str(target.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["42"]


@pytest.mark.parametrize("text", ["VALUE = (\n", "VALUE = '\0'\n"])
def test_a_module_that_cannot_be_compiled_is_left_alone(source: Path, text: str) -> None:
    source.write_text(text)
    assert not (copy(source).parent / "__pycache__").exists()
