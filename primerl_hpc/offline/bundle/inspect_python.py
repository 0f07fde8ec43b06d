"""Describe a Python environment, in any interpreter: `ask` sends this text. Uses the standard library only."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import urllib.parse
from typing import Any


def inspect() -> dict[str, Any]:
    """Return the folders, version and packages of this interpreter."""
    packages, outside = {}, {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if not name or name in packages:
            continue
        packages[name] = distribution.version
        source = json.loads(distribution.read_text("direct_url.json") or "{}")
        if source.get("dir_info", {}).get("editable"):
            outside[name] = urllib.parse.unquote(source["url"].removeprefix("file://"))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return {
        "prefix": os.path.realpath(sys.prefix),
        "base": os.path.realpath(sys.base_prefix),
        "executable": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
        "library": f"{sys.platlibdir}/{version}",
        "python": platform.python_version(),
        "arch": platform.machine(),
        "packages": packages,
        "outside": outside,
    }
