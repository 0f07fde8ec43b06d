"""Find the files of modules by name, and of modules that they import, in any interpreter: `ask` sends this text.

    find_modules(["my_env"], ["my_losses"])
    # {"my_env": "/home/me/my-env/src/my_env", "my_losses": "/home/me/lib/my_losses.py"}

``packages`` are found wherever they are, ``imports`` only outside of the interpreter's installed packages; so are
modules that a found module imports. ``folders``: search only there, for a container whose interpreter is not here.
Uses the standard library only, and imports none of the modules.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig

NEVER = frozenset({"primerl_hpc", "torch", "transformers", "vllm", "numpy", "flash_attn"})
"""Modules that are never copied: this package is copied separately, the others are large and compiled."""


def find_modules(packages: list[str], imports: list[str], folders: list[str] | None = None) -> dict[str, str]:
    """Return top-level module → its file or folder. Modules that cannot be found are left out."""
    found: dict[str, str] = {}
    waiting = [(name, True) for name in packages] + [(name, False) for name in imports]
    seen = set(NEVER) | set(sys.stdlib_module_names)
    while waiting:
        name, may_be_installed = waiting.pop(0)
        top = name.partition(".")[0]
        if top in seen:
            continue
        seen.add(top)
        path = locate(top, folders)
        if path is None or (not may_be_installed and is_installed(top, path)):
            continue
        found[top] = path
        if not is_installed(top, path):
            waiting += [(other, False) for other in sorted(imported_by(path))]
    return found


def locate(name: str, folders: list[str] | None) -> str | None:
    """Return the file of a module, or the folder of a package; None if there is none, or it is not one folder."""
    try:
        if folders is None:
            spec = importlib.util.find_spec(name)
        else:
            spec = importlib.machinery.PathFinder.find_spec(name, folders)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations is not None:
        places = [place for place in spec.submodule_search_locations if os.path.isdir(place)]
        return os.path.realpath(places[0]) if len(places) == 1 else None
    return os.path.realpath(spec.origin) if spec.origin and os.path.isfile(spec.origin) else None


def is_installed(name: str, path: str) -> bool:
    """True if the module was installed by a package manager, so it is not edited in place."""
    parent = os.path.dirname(path)
    if parent in {os.path.realpath(sysconfig.get_path(kind)) for kind in ("purelib", "platlib", "stdlib")}:
        return True
    if os.path.basename(parent) in ("site-packages", "dist-packages"):
        return True
    for distribution in importlib.metadata.distributions(path=[parent]):  # a folder of pip install --target
        if any(file.parts[0] in (name, f"{name}.py") for file in distribution.files or ()):
            return True
    return False


def imported_by(path: str) -> set[str]:
    """Return the top-level names that the Python files of a module import anywhere."""
    names: set[str] = set()
    for file in python_files(path):
        try:
            with open(file, "rb") as source:
                tree = ast.parse(source.read())
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return names


def python_files(path: str) -> list[str]:
    if os.path.isfile(path):
        return [path]
    found = []
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        found += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    return found
