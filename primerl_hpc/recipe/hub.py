"""Names of models, datasets and packages of environments on hubs, and snapshots of models.

is_hub_id("org/model")                        # True: not a path
parse_package("owner/name@0.1.3").version     # "0.1.3"
local_snapshot("org/model")                   # its folder in the cache, or None
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path, PurePath

logger = logging.getLogger(__name__)

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.py", "*.tiktoken")
"""Files of a model besides its weights."""
WEIGHTS = "*.safetensors"
UNREAD_FILES = ("*/*", "consolidated*")
"""Copies of the weights in the formats of other programs."""
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


def local_snapshot(name: str) -> Path | None:
    """Return the folder of a model, a path or a hub id, without a download; None if it is not on this machine.

    The files are those of `download_snapshot`: a look-up for more of them finds no filtered download.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, IncompleteSnapshotError, LocalEntryNotFoundError

    patterns = {"allow_patterns": [WEIGHTS, *SMALL_FILES], "ignore_patterns": list(UNREAD_FILES)}
    try:
        return Path(snapshot_download(name, local_files_only=True, **patterns))
    except IncompleteSnapshotError as error:
        logger.warning("Model %s is incomplete on this machine: %s", name, error)
    except (LocalEntryNotFoundError, HFValidationError):  # HFValidationError: a path that does not exist
        pass
    return None


def download_snapshot(name: str, *, has_weights: bool = True) -> Path:
    """Return the folder of a model of the hub, after a download of missing files. Raises errors of huggingface_hub."""
    from huggingface_hub import snapshot_download

    patterns = [*([WEIGHTS] if has_weights else []), *SMALL_FILES]
    return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=list(UNREAD_FILES)))


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
