"""The files of a Python environment as one folder that runs wherever it is unpacked.

    environment = inspect_environment("/home/me/venv/bin/python")
    for entry in entries(environment): ...

A virtual environment and the interpreter under it become one installation: ``bin/python3.11`` is the base's program,
``lib/python3.11`` its standard library, and ``site-packages`` that of the environment. CPython finds its folders
relative to its executable, and the run paths of its libraries become relative, so no file needs the path. Scripts in
``bin`` start the interpreter next to them. The Python of the operating system stays where it is: such an environment
keeps its ``pyvenv.cfg``.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from primerl_hpc.common.block import Block
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.interpreters import InterpreterError, ask
from primerl_hpc.offline.bundle.run_path import origin_path, with_relative_run_path

OS_PREFIXES = ("/usr", "/")
"""Prefixes of the operating system's Python, whose standard library is on the disk of every node."""
TIMEOUT_S = 120.0
_NOT_IN_LIBRARY = ("site-packages", "test", "idlelib", "turtledemo")
"""Parts of the base's standard library that a run does not import; packages are those of the environment."""
_SKIPPED = ("pyvenv.cfg", "conda-meta", "pkgs", "envs", "lib64")
"""Entries at the top of an environment that are left out."""
_ACTIVATION = re.compile(r"(?i)activate(\..*)?|python[\d.]*(-config)?|conda|conda-.*")
_GLIBC = re.compile(rb"GLIBC_(\d+)\.(\d+)")
_RELATIVE_SHEBANG = (
    b'#!/bin/sh\n\'\'\'exec\' "$(dirname -- "$(readlink -f -- "$0")")/python" "$0" "$@"\n\' \'\'\'\n'
)
"""Start of a script in ``bin``: the shell runs the interpreter next to it, which reads the second line as text."""


class PythonEnvironment(Block):
    prefix: Path
    base: Path
    executable: Path
    """Program of the interpreter, without symbolic links."""
    library: str
    """Folder of the standard library in the prefix: ``lib/python3.11``."""
    python: str
    arch: str
    packages: dict[str, str]
    outside: dict[str, str]

    @property
    def uses_os_python(self) -> bool:
        return str(self.base) in OS_PREFIXES

    @property
    def is_virtual(self) -> bool:
        return self.prefix != self.base


@dataclass(frozen=True)
class BundleEntry:
    """A file, folder or symbolic link of the bundle."""

    name: str
    """Path in the bundle."""
    source: Path
    link: str | None = None
    """Target of a symbolic link."""
    content: bytes | None = None
    """Content that replaces that of ``source``."""


def inspect_environment(python: str) -> PythonEnvironment:
    """Return the environment of an interpreter. Raises ConfigError if it cannot be bundled."""
    function = "primerl_hpc.offline.bundle.inspect_python:inspect"
    try:
        facts: dict[str, Any] = ask(python, None, function, by_source=True, timeout_s=TIMEOUT_S)
    except InterpreterError as error:
        raise ConfigError(
            error.cause, hint="name the python in the bin folder of a virtual or Conda environment"
        ) from error
    found = PythonEnvironment.model_validate(facts)
    if found.uses_os_python and not found.is_virtual:
        raise ConfigError(
            f"{python} is the Python of the operating system, which cannot be bundled",
            hint="create a virtual environment (python -m venv) and install the packages there",
        )
    if _uses_system_packages(found):
        raise ConfigError(
            f"{found.prefix} also uses packages of {found.base} (include-system-site-packages in pyvenv.cfg), which "
            "would be missing in the bundle",
            hint="create an environment that contains all its packages",
        )
    return found


def _uses_system_packages(environment: PythonEnvironment) -> bool:
    try:
        text = (environment.prefix / "pyvenv.cfg").read_text()
    except OSError:
        return False
    return re.search(r"(?im)^include-system-site-packages\s*=\s*true\s*$", text) is not None


def entries(environment: PythonEnvironment) -> Iterator[BundleEntry]:
    """Yield everything in the bundle, folders before their content. Links that lead outside become what they name."""
    version = Path(environment.library).name
    is_own = environment.is_virtual and not environment.uses_os_python
    if is_own:
        yield from _base_entries(environment, version)
        if environment.library.startswith("lib64/"):
            yield BundleEntry("lib64", environment.base, link="lib")
    for name in sorted(os.listdir(environment.prefix)):
        source = environment.prefix / name
        if name == "bin":
            yield from _script_entries(environment, source, version)
        elif name == "lib64" and not source.is_symlink():
            yield from _walk(source, "lib", environment.prefix)
        elif name not in _SKIPPED or (name == "pyvenv.cfg" and environment.uses_os_python):
            yield from _walk(source, name, environment.prefix)


def _base_entries(environment: PythonEnvironment, version: str) -> Iterator[BundleEntry]:
    """Yield the interpreter, its standard library, its shared library and its headers, which compilers need."""
    base = environment.base
    yield _relocated(BundleEntry(f"bin/{version}", environment.executable), base)
    yield BundleEntry("bin/python3", environment.executable, link=version)
    yield BundleEntry("bin/python", environment.executable, link=version)
    library = base / environment.library
    for name in sorted(os.listdir(library)):
        if name not in _NOT_IN_LIBRARY and not name.startswith("config-"):
            for entry in _walk(library / name, f"lib/{version}/{name}", library):
                yield _relocated(entry, base)
    for shared in sorted((base / "lib").glob("libpython3*.so*")):
        for entry in _walk(shared, f"lib/{shared.name}", base / "lib"):
            yield _relocated(entry, base)
    if (base / "include" / version).is_dir():
        yield from _walk(base / "include" / version, f"include/{version}", base / "include")


def _relocated(entry: BundleEntry, base: Path) -> BundleEntry:
    """Return a file of the interpreter, which finds the interpreter's shared libraries in the bundle."""
    is_program = entry.name.startswith("bin/") or ".so" in Path(entry.name).suffixes
    if entry.link is not None or not is_program or not entry.source.is_file():
        return entry
    data = entry.source.read_bytes()
    changed = with_relative_run_path(data, base / "lib", origin_path(entry.name, "lib"))
    return entry if changed is data else replace(entry, content=changed)


def _script_entries(environment: PythonEnvironment, folder: Path, version: str) -> Iterator[BundleEntry]:
    """Yield the content of ``bin``; scripts with the path of the interpreter start the one next to them."""
    interpreters = re.compile(
        rb"^#!\s*" + re.escape(os.fsencode(folder)) + rb"/(?:python|pypy)[\d.]*[^\n]*\n"
        rb"|^#!/bin/sh\n'''exec' [^\n]*" + re.escape(os.fsencode(folder)) + rb"[^\n]*\n' '''"
    )
    for name in sorted(os.listdir(folder)):
        source, target = folder / name, f"bin/{name}"
        if _ACTIVATION.fullmatch(name):
            if environment.uses_os_python and name.startswith("python"):
                yield from _interpreter_link(source, target)
            elif not environment.is_virtual and name.startswith("python"):
                yield from _walk(source, target, environment.prefix)
            continue
        if source.is_file() and not source.is_symlink():
            content = source.read_bytes() if source.stat().st_size < 1 << 20 else b""
            if (match := interpreters.match(content)) is not None:
                yield BundleEntry(target, source, content=_RELATIVE_SHEBANG + content[match.end() :])
                continue
        yield from _walk(source, target, environment.prefix)


def _interpreter_link(source: Path, target: str) -> Iterator[BundleEntry]:
    """Yield a link to the operating system's interpreter, which stays absolute."""
    link = os.readlink(source) if source.is_symlink() else str(source)
    yield BundleEntry(target, source, link=link)


def _walk(source: Path, target: str, root: Path, above: tuple[Path, ...] = ()) -> Iterator[BundleEntry]:
    """Yield a file or folder below ``root``; ``above``: real folders that contain it, to end loops of links."""
    if source.is_symlink():
        real = source.resolve()
        if real.is_relative_to(root.resolve()) and real.exists():
            yield BundleEntry(target, source, link=os.path.relpath(real, source.parent.resolve()))
            return
        if not real.exists() or real in above:
            return
        source = real
    mode = source.stat().st_mode
    if stat.S_ISREG(mode):
        yield BundleEntry(target, source)
    elif stat.S_ISDIR(mode):
        yield BundleEntry(target, source)
        inner = root if source.is_relative_to(root) else source
        for name in sorted(os.listdir(source)):
            yield from _walk(source / name, f"{target}/{name}", inner, (*above, source.resolve()))


def needed_glibc(environment: PythonEnvironment) -> str | None:
    """Return the newest glibc version that the interpreter and its standard library name; None: no glibc."""
    library = environment.base / environment.library / "lib-dynload"
    programs = [
        environment.executable,
        *library.glob("*.so"),
        *(environment.base / "lib").glob("libpython3*.so"),
    ]
    found = {
        (int(match[1]), int(match[2])) for path in programs for match in _GLIBC.finditer(path.read_bytes())
    }
    return ".".join(map(str, max(found))) if found else None
