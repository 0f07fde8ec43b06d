"""What a name of a model or dataset in a recipe means: a hub id, or a path."""

from __future__ import annotations

import re
from pathlib import Path, PurePath

SUFFIXES = (".jsonl", ".parquet")
"""Of files with rows."""

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def is_hub_id(name: str, folder: Path | None = None) -> bool:
    """``owner/name``, unless ``folder`` holds that, or an ``owner``: then a path below it is meant that is misspelt.

    Without a folder: in a resolved recipe, whose paths are absolute.
    """
    if _ID.fullmatch(name) is None or PurePath(name).suffix in SUFFIXES:
        return False
    return folder is None or not (folder / name.partition("/")[0]).exists()
