"""Import transformers without reading the source of all its models.

    read_models_once()
    from transformers import AutoTokenizer

To know which name is in which module, transformers reads 1,500 files of source when it is imported, twice: half of the
time of its import, and as many operations on a shared filesystem in each rank. What it finds is kept in the user's
cache folder for the installed version, and read from there. Standard library only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_MODULE = "transformers.utils.import_utils"
_SCAN = "create_import_structure_from_path"
FORMAT = 1


def read_models_once(*, may_write: bool = True) -> None:
    """From now on, let transformers take the names of its models from the cache; nothing if it is imported already.

    Without ``may_write`` the names are kept in this process only, if the cache does not have them.
    """
    if _MODULE not in sys.modules and not any(isinstance(finder, _ModelsFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ModelsFinder(may_write))


class _ModelsFinder(MetaPathFinder):
    """Replaces the function that reads the models, as soon as its module has been imported."""

    def __init__(self, may_write: bool) -> None:
        self.may_write = may_write
        self.known = ""
        """JSON of the names; empty before the first import."""

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        spec.loader = _Replacing(spec.loader, self)
        return spec

    def remembering(self, scan: Callable[[Any], dict], import_utils: Path) -> Callable[[Any], dict]:
        """Return ``scan`` with a memory for the folder of all models; other folders are read as before."""
        models = import_utils.parents[1] / "models"

        @functools.wraps(scan)
        def remembered(path: Any) -> dict:
            folder = Path(path)
            if (folder.parent if folder.suffix == ".py" else folder) != models:
                return scan(path)
            cache = cache_file(models.parent)
            self.known = self.known or _read(cache)
            if not self.known:
                self.known = json.dumps(encode(scan(path)))
                if self.may_write:
                    _write(cache, self.known)
            return decode(json.loads(self.known))  # a copy for each caller, who may change it

        return remembered


class _Replacing(Loader):
    """Loads the module, then replaces the function."""

    def __init__(self, loader: Loader, finder: _ModelsFinder) -> None:
        self.loader, self.finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        if (scan := getattr(module, _SCAN, None)) is not None:
            setattr(module, _SCAN, self.finder.remembering(scan, Path(module.__file__ or "")))


def cache_file(package: Path) -> Path | None:
    """Return the file for this installation, named by its path and the time and size of its list of files.

    None if transformers is not installed from a wheel: its source may change at any time.
    """
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home folder
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        for record in package.parent.glob("transformers-*.dist-info/RECORD"):
            facts = record.stat()
            place = hashlib.sha256(str(package).encode()).hexdigest()[:12]
            name = f"{FORMAT}-{record.parent.name}-{facts.st_size}-{facts.st_mtime_ns}-{place}"
            return caches / "primerl-hpc" / f"{name}.json"
    return None


def encode(structure: dict) -> dict[str, Any]:
    """Return JSON for ``{frozenset of backends: {module: names}, subfolder: {…}}``."""
    return {
        "modules": [
            [sorted(backends), {module: sorted(names) for module, names in modules.items()}]
            for backends, modules in structure.items()
            if not isinstance(backends, str)
        ],
        "folders": {name: encode(below) for name, below in structure.items() if isinstance(name, str)},
    }


def decode(structure: dict[str, Any]) -> dict:
    modules = {
        frozenset(backends): {module: set(names) for module, names in found.items()}
        for backends, found in structure["modules"]
    }
    return {**modules, **{name: decode(below) for name, below in structure["folders"].items()}}


def _read(cache: Path | None) -> str:
    """Return the content of the cache; empty if there is none, or if it belongs to another user."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        if cache is not None:
            with cache.open(encoding="utf-8") as file:
                text = file.read() if os.fstat(file.fileno()).st_uid == os.geteuid() else ""
            decode(json.loads(text))
            return text
    return ""


def _write(cache: Path | None, text: str) -> None:
    """Write the cache in one step. A run without a writable home folder reads the models again."""
    with contextlib.suppress(OSError):
        if cache is not None:
            cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=cache.parent, prefix=f".{cache.name}.")
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).replace(cache)
