"""Names of models, datasets and packages of environments on hubs.

is_hub_id("org/model")                        # True: not a path
parse_package("owner/name@0.1.3").version     # "0.1.3"
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePath

SUFFIXES = (".jsonl", ".parquet")
"""Suffixes of files with SFT rows."""

ENVIRONMENTS_INDEX = "https://hub.primeintellect.ai"
"""Index of packages of environments: of an owner at ``/<owner>/simple``."""
PACKAGE_FORM = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*@[0-9][\w.+!-]*"
"""``owner/name@version`` with an exact version."""
_PACKAGE = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)(?:@([\w.+!-]+))?", re.ASCII)
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def is_hub_id(name: str, folder: Path | None = None) -> bool:
    """True if ``name`` has the form ``owner/name`` and is not a path below ``folder``.

    If ``folder`` contains ``owner``, the name is taken for a (possibly misspelled) path. Without ``folder`` the recipe
    is resolved, so its paths are absolute.
    """
    if _ID.fullmatch(name) is None or PurePath(name).suffix in SUFFIXES:
        return False
    return folder is None or not (folder / name.partition("/")[0]).exists()


@dataclass(frozen=True)
class HubPackage:
    """A package of an environment on the Environments Hub."""

    owner: str
    name: str
    version: str | None = None
    """None: the newest one."""

    def __str__(self) -> str:
        return f"{self.owner}/{self.name}" + (f"@{self.version}" if self.version else "")


def parse_package(text: str) -> HubPackage | None:
    """Return the package that ``owner/name`` or ``owner/name@version`` names; None for text of another form."""
    match = _PACKAGE.fullmatch(text)
    if match is None or ".." in text:
        return None
    return HubPackage(match[1], match[2], None if match[3] == "latest" else match[3])
