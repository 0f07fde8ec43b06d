"""Import objects that a recipe names as ``package.module:name``."""

from __future__ import annotations

import importlib
from typing import Any

from primerl_hpc.common.errors import ConfigError


def import_object(path: str, *, location: str) -> Any:
    """Return the object at ``package.module:name``.

    Raises ConfigError with ``location`` (the recipe's key) if the module cannot be imported or has no such name.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(
            f"{path!r} is not an import path", location=location, hint="write package.module:name"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"importing '{module_name}' failed: {error}",
            location=location,
            hint="install its package, or put its folder on PYTHONPATH (recipe: env)",
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigError(f"module '{module_name}' has no '{name}'", location=location) from None
