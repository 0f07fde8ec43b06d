"""Defer imports of libraries that verifiers imports for interfaces that most runs do not use.

    defer_imports()         # before verifiers is imported

verifiers 0.4.0 imports the Anthropic SDK for two classes, math_verify, with sympy, for two functions, and all its
tasksets, with the SDK of MCP, to look for one: half of the CPU time and a third of the memory of its import, in each
process that loads environments. Until something else of them is used, only the submodules with these classes and the
taskset itself are imported, and the functions import their module when called. Then the package is completed, and is
the same as without this module.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import threading
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = frozenset({"anthropic", "anthropic.types", "math_verify", "verifiers.v1.tasksets"})
BY_ATTRIBUTE = frozenset({"anthropic.types"})
"""Packages that only import their submodules, so that an attribute can be imported alone."""
FUNCTIONS = {"math_verify": frozenset({"parse", "verify"})}
"""Functions that import their module when they are called."""
_lock = threading.RLock()


def defer_imports() -> None:
    """Defer imports of `PACKAGES` that this process has not imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in PACKAGES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None and spec.origin is not None:
            spec.loader = _Deferring(spec.loader)
        return spec


class _Deferring(Loader):
    """Creates the package without executing it."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = DeferredPackage

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class DeferredPackage(ModuleType):
    """A package whose attributes are imported one by one, or all if one of them is not in a submodule."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in FUNCTIONS.get(self.__name__, ()):
            return _deferred_function(self, name)
        origin = _origins(self).get(name) if self.__name__ in BY_ATTRIBUTE else None
        if origin is not None:
            module, original = origin
            return getattr(importlib.import_module(f".{module}", self.__name__), original)
        if PathFinder.find_spec(f"{self.__name__}.{name}", self.__path__) is not None:
            return importlib.import_module(f".{name}", self.__name__)
        return getattr(complete(self), name)


def complete(module: ModuleType) -> ModuleType:
    """Execute a deferred package, unless that has been done."""
    with _lock:
        if isinstance(module, DeferredPackage):
            package: Any = module  # its class is assigned
            package.__class__ = ModuleType
            package.__spec__.loader = package.__loader__ = package.__spec__.loader.loader
            package.__loader__.exec_module(package)
    return module


def _deferred_function(module: ModuleType, name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(complete(module), name)(*arguments, **options)

    call.__name__ = call.__qualname__ = name
    return call


def _origins(module: ModuleType) -> dict[str, tuple[str, str]]:
    """Return (submodule, its attribute) by attribute, from the import statements of the package's file."""
    known: dict[str, tuple[str, str]] | None = vars(module).get("_deferred_origins")
    if known is None:
        tree = ast.parse(Path(inspect.getfile(module)).read_text())
        known = {
            alias.asname or alias.name: (node.module, alias.name)
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
            for alias in node.names
        }
        vars(module)["_deferred_origins"] = known
    return known
