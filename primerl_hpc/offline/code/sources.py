"""Find the files that belong to the code of a run, with limits on their number and size.

sources = find_sources(plan)            # reads files, writes nothing
sources.digest                          # equal for equal files
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from primerl_hpc.common.env import PYTHONPATH
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.interpreters import InterpreterError, ask
from primerl_hpc.common.package import MODULES, package_folder
from primerl_hpc.plan.plan import BUNDLE_PYTHON, Plan, ProcessPlan
from primerl_hpc.recipe.custom_code import custom_code

MAX_BYTES = 64 << 20
"""Limit of the modules of one run. Data belongs into a dataset, not into a module."""
MAX_FILES = 5000
NOT_CODE = frozenset({"tests", "test", "outputs", "runs", "wandb", "dist", "build", "node_modules"})
"""Folders at the top of a module that are left out, in addition to hidden ones and ``__pycache__`` at any depth."""


@dataclass(frozen=True)
class ModuleSource:
    """A module that a recipe names, or that such a module imports."""

    name: str
    source: str
    folder: str
    """Folder of the copy, relative to the copy of the code."""
    files: int
    size_bytes: int


@dataclass(frozen=True)
class CodeSources:
    files: dict[str, Path]
    """Target, relative to the copy of the code → source."""
    links: dict[str, str] = field(default_factory=dict)
    """Target → absolute path of a folder that a symbolic link names: what is behind a link is not copied."""
    modules: tuple[ModuleSource, ...] = ()
    roles: dict[str, str] = field(default_factory=dict)
    """Role → folder with the modules that its interpreter finds. Roles without such modules are left out."""
    digest: str = ""
    """SHA-256 of all targets and contents."""

    @property
    def package(self) -> dict[str, Path]:
        """Files of this package."""
        return {target: source for target, source in self.files.items() if not _is_of_module(target)}

    @property
    def module_files(self) -> dict[str, Path]:
        """Files of the modules that the recipes name."""
        return {target: source for target, source in self.files.items() if _is_of_module(target)}


def _is_of_module(target: str) -> bool:
    return target.startswith(f"{MODULES}/")


def find_sources(plan: Plan) -> CodeSources:
    """Return the files of this package and of the modules that the recipes of the plan name.

    Raises ConfigError for a module that exceeds the limits or cannot be read.
    """
    files = dict(_files_of(package_folder(), ""))
    modules, roles = _find_by_role(plan)
    links: dict[str, str] = {}
    sources: list[ModuleSource] = []
    for folder, paths in modules.items():
        for name, path in sorted(paths.items()):
            found = dict(_files_of(Path(path), f"{folder}/"))
            size = sum(file.stat().st_size for file in found.values())
            sources.append(ModuleSource(name, path, folder, len(found), size))
            _check_size(sources, found)
            files |= found
            links |= dict(_links_of(Path(path), f"{folder}/"))
    return CodeSources(files, links, tuple(sources), roles, _digest(files, links))


def _find_by_role(plan: Plan) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return folder of the copy → modules in it (name → path), and role → folder."""
    code = [item for phase in plan.phases for item in custom_code(phase.recipe)]
    packages = sorted({name for item in code if item.is_package for name in item.modules})
    imports = sorted({name for item in code if not item.is_package for name in item.modules})
    if not packages and not imports:
        return {}, {}
    folders: dict[str, dict[str, str]] = {}
    roles: dict[str, str] = {}
    known: dict[tuple[str | None, str | None], dict[str, str]] = {}
    for phase in plan.phases:
        for process in (*phase.processes, *phase.elastic):
            if process.role.value in roles:
                continue
            python = process.argv[0] if process.container == "none" else None
            python = sys.executable if python == BUNDLE_PYTHON else python
            key = (python, process.env.get(PYTHONPATH))
            if key not in known:
                known[key] = _ask(process, python, packages, imports)
            if not (found := known[key]):
                continue
            same = next((folder for folder, modules in folders.items() if modules == found), None)
            folder = same or f"{MODULES}/{len(folders) + 1}"
            folders[folder] = found
            roles[process.role.value] = folder
    return folders, roles


def _ask(
    process: ProcessPlan, python: str | None, packages: Sequence[str], imports: Sequence[str]
) -> dict[str, str]:
    """Return the modules that the interpreter of a process finds; in a container, those in its PYTHONPATH.

    Nothing if the interpreter is not on this machine: the modules then stay where they are.
    """
    path = process.env.get(PYTHONPATH, "")
    folders = None if python is not None else [part for part in path.split(os.pathsep) if part]
    function = "primerl_hpc.offline.code.find_modules:find_modules"
    try:
        interpreter, variables = python or sys.executable, {PYTHONPATH: path}
        return ask(interpreter, variables, function, packages, imports, folders, by_source=True)
    except InterpreterError as error:
        print(f"note: modules of {process.role.value} are not copied: {error.cause}", file=sys.stderr)
        return {}


def _files_of(path: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    """Yield (target, source) of a module: a file, or all regular files of a package's folder."""
    if path.is_file():
        yield prefix + path.name, path
        return
    for text, folders, names in os.walk(path):
        folder = Path(text)
        is_top = folder == path
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name != "__pycache__" and not (is_top and name in NOT_CODE)
        )
        for name in sorted(names):
            file = folder / name
            if not name.endswith((".pyc", ".pyo")) and stat.S_ISREG(_stat(file).st_mode):
                yield f"{prefix}{path.name}/{file.relative_to(path)}", file


def _links_of(path: Path, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (target, absolute path) of the symbolic links to folders in a package."""
    for text, folders, _ in os.walk(path):
        for name in folders:
            if (link := Path(text, name)).is_symlink():
                yield f"{prefix}{path.name}/{link.relative_to(path)}", str(link.resolve())


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raise ConfigError in place of an OSError of the block, which reads ``file``."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"a file of the run's code cannot be read: {error.strerror or error}",
            location=str(file),
            hint="repair or remove it, make it readable, or submit with --live-code",
        ) from error


def _stat(file: Path) -> os.stat_result:
    with _reading(file):
        return file.stat()


def _check_size(sources: Sequence[ModuleSource], files: dict[str, Path]) -> None:
    """Raise ConfigError if the modules exceed the limits, with the largest file of the last one."""
    size, count = sum(item.size_bytes for item in sources), sum(item.files for item in sources)
    if size <= MAX_BYTES and count <= MAX_FILES:
        return
    last = sources[-1]
    largest = max(files.values(), key=lambda file: file.stat().st_size)
    raise ConfigError(
        f"the code of the run would have {size / 2**20:.0f} MiB in {count} files with module {last.name} "
        f"(largest file: {largest.name}, {largest.stat().st_size / 2**20:.0f} MiB); "
        f"the limit is {MAX_BYTES >> 20} MiB and {MAX_FILES} files",
        location=last.source,
        hint="move data out of the module, or run it from where it is with --live-code",
    )


def _digest(files: dict[str, Path], links: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(links, sort_keys=True).encode())
    for target, source in sorted(files.items()):
        with _reading(source):
            content = hashlib.sha256(source.read_bytes()).digest()
        digest.update(f"{target}\0".encode() + content)
    return digest.hexdigest()
