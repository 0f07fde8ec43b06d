"""Identify the running copy of this package: version, content and folder. Supervisor and roles of a run must agree.

variables[env.PACKAGE] = expected_package(SoftwareKind.PLAIN)   # the supervisor, for a process that it starts
check_package(env.package())                                # that process; raises ConfigError for another copy
"""

from __future__ import annotations

import hashlib
import site
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from primerl_hpc import __version__
from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.files import read_json_or_none

SHOWN = 8
"""Digits of a content id that are displayed."""
PACKAGE_ZIP = "primerl_hpc.zip"
"""This package in the copy of a run's code (`offline/code`)."""
CODE_MANIFEST = "code.json"
"""File next to it: where the files of the copy came from, and which role uses which folder of modules."""
MODULES = "modules"
"""Folder of a run's copy of the code with modules that are not part of this package."""


class SoftwareKind(StrEnum):
    """Kind of environment from which a process imports its package."""

    PLAIN = "plain"  # the supervisor's interpreter, on the node itself
    INTERPRETER = "interpreter"  # another interpreter: the same package may be in another folder
    CONTAINER = "container"  # inside a container: the same folder may contain another package


def package_folder() -> Path:
    """Return the folder of this package; it may be in a zip file."""
    return Path(__file__).resolve().parents[1]


def package_root() -> str | None:
    """Return the folder for PYTHONPATH if the package runs from a checkout, None if it is installed."""
    checkout = package_folder().parent
    return str(checkout) if (checkout / "setup.cfg").is_file() else None


def with_package(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process with this package in PYTHONPATH, also in another interpreter."""
    path = env.join_pythonpath(package_root(), environ.get(env.PYTHONPATH))
    return {**environ, env.PYTHONPATH: path}


def _copy_folder() -> Path:
    """Return the folder of the copy of the code that this process executes, if it executes one."""
    root = package_folder().parent
    return root.parent if root.name == PACKAGE_ZIP else root


def is_in_user_site() -> bool:
    """True if this package is imported from the packages in the home folder (``pip install --user``)."""
    return package_folder().is_relative_to(Path(site.getusersitepackages()).resolve())


def user_site_variables() -> dict[str, str]:
    """Return the variable that hides packages in the home folder: they would replace those of the environment."""
    return {} if is_in_user_site() else {"PYTHONNOUSERSITE": "1"}


@cache
def _manifest() -> dict[str, Any]:
    return read_json_or_none(_copy_folder() / CODE_MANIFEST) or {}


def code_name() -> str:
    """Return the copy of the run's code that this process executes, such as ``code/1``, or ``live``."""
    folder = _copy_folder()
    return f"{folder.parent.name}/{folder.name}" if _manifest() else "live"


def kept_modules(role: str) -> str | None:
    """Return the folder with the run's copy of the modules that processes of ``role`` import; None if there is none."""
    folder = _manifest().get("roles", {}).get(role)
    return str(_copy_folder() / folder) if folder else None


@cache
def content_id() -> str:
    """Return a SHA-256 digest of the package's Python files."""
    digest = hashlib.sha256()
    for name, content in sorted(_python_files(resources.files("primerl_hpc"), "")):
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def _python_files(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    """Yield (relative path, content)."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _python_files(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".py"):
            yield prefix + entry.name, entry.read_bytes()


def expected_package(software: SoftwareKind) -> str:
    """Return the argument for `check_package`. The content is included only if the folder may differ."""
    content = "-" if software == SoftwareKind.PLAIN else content_id()
    return f"{software} {__version__} {content} {package_folder()}"


def check_package(expected: str | None) -> None:
    """Raise ConfigError if this process runs another copy of the package than the supervisor.

    ``expected``: from the supervisor's `expected_package`; None skips the check.
    """
    if expected is None:
        return
    software, version, content, folder = expected.split(" ", 3)
    is_same_folder = Path(folder) == package_folder()
    if version == __version__ and is_same_folder and software != SoftwareKind.CONTAINER:
        return
    if version == __version__ and software != SoftwareKind.PLAIN and content == content_id():
        return
    with_content = software != SoftwareKind.PLAIN and version == __version__
    own_content = f" (content {content_id()[:SHOWN]})" if with_content else ""
    supervisor_content = f" (content {content[:SHOWN]})" if with_content else ""
    hint = (
        "remove the folder of the other copy from PYTHONPATH (env of the recipe or profile)"
        if software == SoftwareKind.PLAIN
        else "install the supervisor's version in the interpreter or container of this role "
        "(software.roles of the profile)"
    )
    raise ConfigError(
        f"this process would run primerl-hpc {__version__}{own_content} from {package_folder()}, "
        f"but the supervisor runs {version}{supervisor_content} from {folder}",
        hint=hint,
    )
