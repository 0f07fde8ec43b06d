"""Copy the code of a run into its directory, and choose the code that its next attempt executes.

    code = plan_code(run, plan)             # the copy that will exist: nothing is written
    keep_code(run, code)                    # writes code/<n>, and what it is into provenance.json
    code_root(run)                          # for PYTHONPATH of the run's scripts

A copy consists of this package in one file, and a folder of the modules that the recipe names, which may read data in
their own folder. It is never changed: ``resume --new-code`` adds another one. It is complete when its code.json exists.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from primerl_hpc import __version__
from primerl_hpc.common.errors import ConfigError, DataError
from primerl_hpc.common.files import read_json_or_none, write_json
from primerl_hpc.common.package import CODE_MANIFEST, PACKAGE_ZIP, package_folder, package_root
from primerl_hpc.offline.code.package_zip import write_package
from primerl_hpc.offline.code.sources import CodeSources, find_sources
from primerl_hpc.plan.plan import Plan
from primerl_hpc.run.access.ownership import make_private
from primerl_hpc.run.rundir import RunDir

LIVE = "live"
"""Value of ``runs_code`` in provenance.json for a run that executes the submitter's installation or checkout."""


class CodeChoice(StrEnum):
    """Code that the next attempt of a run executes."""

    KEPT = "kept"  # the newest copy; a run without a copy stays live
    NEW = "new"  # a further copy of the present code
    LIVE = "live"  # the present installation or checkout, without a copy


@dataclass(frozen=True)
class RunCode:
    """The copy of the code that a submission executes."""

    folder: Path
    sources: CodeSources

    @property
    def root(self) -> str:
        """Return what the scripts add to PYTHONPATH."""
        return str(_import_root(self.folder))


def plan_code(run: RunDir, plan: Plan) -> RunCode:
    """Return the copy for a submission: the newest one if it is equal, else the next number.

    Raises ConfigError for code that cannot be copied.
    """
    sources = find_sources(plan)
    copies = complete_copies(run)
    if copies and (read_json_or_none(copies[-1] / CODE_MANIFEST) or {}).get("digest") == sources.digest:
        return RunCode(copies[-1], sources)
    return RunCode(run.code_copy(_last_number(run) + 1), sources)


def keep_code(run: RunDir, code: RunCode) -> None:
    """Write the copy unless it exists. Raises ConfigError if a file cannot be read, OSError if it cannot be written."""
    if (code.folder / CODE_MANIFEST).is_file():
        return
    make_private(run.code)
    make_private(code.folder)
    for folder in sorted({folder for target in code.sources.module_files for folder in Path(target).parents}):
        make_private(code.folder / folder)
    with _reading():
        write_package(code.sources.package, code.folder / PACKAGE_ZIP)
        for target, source in code.sources.module_files.items():
            shutil.copyfile(source, code.folder / target)
            (code.folder / target).chmod(0o700 if os.access(source, os.X_OK) else 0o600)
    for target, destination in code.sources.links.items():
        (code.folder / target).parent.mkdir(parents=True, exist_ok=True)
        (code.folder / target).symlink_to(destination)
    write_json(code.folder / CODE_MANIFEST, _describe(code.sources))


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ConfigError(
            "a file of the run's code disappeared while it was copied",
            location=str(error.filename),
            hint="submit again while the code is not being edited",
        ) from error


def _describe(sources: CodeSources) -> dict[str, Any]:
    package = package_folder()
    return {
        "version": __version__,
        "time": round(time.time(), 3),
        "digest": sources.digest,
        "files": len(sources.files),
        "package": {"source": str(package), "git": git_state(package.parent)},
        "modules": [
            asdict(module) | {"git": git_state(_folder_of(Path(module.source)))} for module in sources.modules
        ],
        "roles": sources.roles,
    }


def _folder_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def describe_code(run: RunDir, code: RunCode | None) -> dict[str, Any]:
    """Return the part of provenance.json about the code: what the run executes, and all its copies."""
    copies = [
        {"folder": str(copy.relative_to(run.root)), **(read_json_or_none(copy / CODE_MANIFEST) or {})}
        for copy in complete_copies(run)
    ]
    runs = LIVE if code is None else str(code.folder.relative_to(run.root))
    return {"runs_code": runs, "code_copies": copies}


def complete_copies(run: RunDir) -> list[Path]:
    """Return the complete copies of the code, oldest first."""
    folders = [run.code_copy(number) for number in range(1, _last_number(run) + 1)]
    return [folder for folder in folders if (folder / CODE_MANIFEST).is_file()]


def _last_number(run: RunDir) -> int:
    try:
        names = os.listdir(run.code)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return max((int(name) for name in names if name.isdecimal()), default=0)


def code_root(run: RunDir) -> str | None:
    """Return what the run's scripts add to PYTHONPATH; None if the package is installed in their interpreter."""
    runs = (read_json_or_none(run.provenance) or {}).get("runs_code", LIVE)
    return package_root() if runs == LIVE else str(_import_root(run.root / runs))


def _import_root(copy: Path) -> Path:
    """Return where Python finds the package of a copy. Earlier versions copied it as a folder."""
    return copy if (copy / "primerl_hpc").is_dir() else copy / PACKAGE_ZIP


def has_copy(run: RunDir) -> bool:
    """True if the run executes a copy of the code."""
    return (read_json_or_none(run.provenance) or {}).get("runs_code", LIVE) != LIVE


def choose_code(run: RunDir, plan: Plan, choice: CodeChoice) -> bool:
    """Record the code of the next attempt, and copy it if it is new. True if the scripts must be rendered again.

    Raises ConfigError for code that cannot be copied.
    """
    recorded = read_json_or_none(run.provenance) or {}
    copies = complete_copies(run)
    if choice == CodeChoice.NEW:
        code = plan_code(run, plan)
        keep_code(run, code)
    elif choice == CodeChoice.LIVE or not copies:
        code = None
    else:
        code = RunCode(copies[-1], CodeSources({}))
    facts = describe_code(run, code)
    if facts["runs_code"] == recorded.get("runs_code", LIVE):
        return False
    write_json(run.provenance, {**recorded, **facts})
    return True


@cache
def git_state(folder: Path) -> dict[str, object] | None:
    """Return commit and cleanliness of the checkout that contains ``folder``; None if there is none."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def has_module(root: Path, name: str) -> bool:
    """True if this module or package is at the root of a copy (`code_root`): ``primerl_hpc.runtime.supervisor``.

    Raises DataError for a copy that cannot be read.
    """
    path = name.replace(".", "/")
    candidates = (f"{path}.py", f"{path}/__init__.py")
    if root.is_dir():
        return any((root / candidate).is_file() for candidate in candidates)
    try:
        with zipfile.ZipFile(root) as package:
            return not set(candidates).isdisjoint(package.namelist())
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(
            f"the copy of the run's code cannot be read: {error}",
            location=str(root),
            hint="use primerl-hpc resume --new-code",
        ) from error
