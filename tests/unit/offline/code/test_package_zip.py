"""The file with a run's copy of this package: what it was compiled from, and what its tracebacks show."""

from __future__ import annotations

import os
import py_compile
import stat
import subprocess
import sys
import warnings
import zipfile
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from primerl_hpc.offline.code.package_zip import write_package

LONG_AGO = 1_700_000_000
TEXT = "VALUE = 1\ndef fail():\n    raise ValueError('x')\nwhere = [lambda: VALUE]\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A module that was compiled long after it was written."""
    path = tmp_path / "source" / "module.py"
    path.parent.mkdir()
    path.write_text(TEXT)
    os.utime(path, (LONG_AGO, LONG_AGO))
    py_compile.compile(str(path))
    return path


def pack(source: Path) -> Path:
    target = source.parents[1] / "package.zip"
    write_package({"module.py": source}, target)
    return target


def run(target: Path, code: str, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *options, "-c", code]
    environ = {**os.environ, "PYTHONPATH": str(target)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def imported(target: Path) -> str:
    """Import the module, check that Python compiled nothing, and return its value."""
    done = run(target, "import module; print(module.VALUE)", "-v")
    assert f"# code object from '{target}/module.py" not in done.stderr
    assert f"import 'module' # <zipimporter object \"{target}/\">" in done.stderr, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("is_compiled", [True, False])
def test_an_import_needs_one_file_of_the_owner(source: Path, is_compiled: bool) -> None:
    if not is_compiled:
        Path(cache_from_source(str(source))).unlink()
    target = pack(source)
    assert imported(target) == "1" and stat.S_IMODE(target.stat().st_mode) == 0o600
    assert zipfile.ZipFile(target).namelist() == ["module.py", "module.pyc"]
    assert sorted(target.parent.iterdir()) == [target, source.parent]


def test_tracebacks_name_the_file_and_show_the_line(source: Path) -> None:
    target = pack(source)
    code = "import module, logging\ntry: module.fail()\nexcept ValueError: logging.exception('x')"
    lines = run(target, code).stderr.splitlines()
    assert lines[-3:] == [
        f'  File "{target}/module.py", line 3, in fail',
        "    raise ValueError('x')",
        "ValueError: x",
    ]
    nested = run(target, "import module; print(module.where[0].__code__.co_filename)")
    assert nested.stdout.strip() == f"{target}/module.py"


def test_what_python_has_compiled_is_used(source: Path) -> None:
    cache = Path(cache_from_source(str(source)))
    cache.write_bytes(cache.read_bytes().replace(b"where", b"there"))
    assert run(pack(source), "from module import there").returncode == 0


def test_a_half_written_cache_is_not_used(source: Path) -> None:
    cache = Path(cache_from_source(str(source)))
    cache.write_bytes(cache.read_bytes()[:-20])
    assert imported(pack(source)) == "1"


def test_a_source_edited_within_a_second_is_compiled_again(source: Path) -> None:
    """The time in Python's file is that of the edited source, to the second."""
    cache = Path(cache_from_source(str(source)))
    source.write_text(TEXT.replace("1", "2"))
    os.utime(source, (LONG_AGO, LONG_AGO))
    os.utime(cache, (LONG_AGO + 0.5, LONG_AGO + 0.5))
    assert imported(pack(source)) == "2"


def test_a_source_edited_while_it_is_copied_does_not_change_the_copy(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The edit comes after the read, with a compiled form that matches the edited source."""
    read = Path.read_bytes

    def read_then_edit(path: Path) -> bytes:
        content = read(path)
        if path == source:
            source.write_text(TEXT.replace("1", "3"))
            py_compile.compile(str(source))
        return content

    monkeypatch.setattr(Path, "read_bytes", read_then_edit)
    assert imported(pack(source)) == "1"


@pytest.mark.parametrize("text", ["VALUE = (\n", "VALUE = '\0'\n"])
def test_a_module_that_cannot_be_compiled_is_left_to_its_import(source: Path, text: str) -> None:
    source.write_text(text)
    target = pack(source)
    assert zipfile.ZipFile(target).namelist() == ["module.py"]
    assert "SyntaxError" in run(target, "import module").stderr


def test_warnings_of_the_compiler_are_not_printed(source: Path) -> None:
    source.write_text('PATTERN = "\\d"\n')
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        pack(source)
    assert not seen
