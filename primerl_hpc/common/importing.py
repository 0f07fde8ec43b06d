"""Objects named in a recipe by where they are: ``package.module:name``."""

from __future__ import annotations

import importlib
from typing import Any

from primerl_hpc.common.errors import ConfigError


def import_object(path: str, *, place: str) -> Any:
    """The object at ``package.module:name``.

    Raises ConfigError naming ``place`` (the recipe's key) when the module cannot be imported or has no such name.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{path!r} is not an import path", place=place, mend="write package.module:name")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"importing '{module_name}' failed: {error}",
            place=place,
            mend="install its package, or put its folder on PYTHONPATH (recipe: env)",
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigError(f"module '{module_name}' has no '{name}'", place=place) from None
