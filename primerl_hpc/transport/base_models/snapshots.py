"""Snapshots of hub models in the local cache. Downloads and look-ups ask for the same files.

download_snapshot("org/model")          # its folder, after a download of missing files
local_snapshot("org/model")             # its folder, or None if it is not on this machine
base_folder("/models/base")             # a folder, or that of a hub id; NotFoundError if it is neither
"""

from __future__ import annotations

import logging
from pathlib import Path

from primerl_hpc.common.errors import NotFoundError

logger = logging.getLogger(__name__)

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.py", "*.tiktoken")
"""Files of a model besides its weights."""
WEIGHTS = "*.safetensors"
UNREAD_FILES = ("*/*", "consolidated*")
"""Copies of the weights in the formats of other programs."""


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


def base_folder(model_path: str) -> Path:
    """Return the folder of the base model: a path, or its hub snapshot. Raises NotFoundError if it is neither."""
    path = Path(model_path)
    if path.is_dir():
        return path
    if path.is_absolute():
        raise NotFoundError(f"the model folder {path} does not exist")
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return download_snapshot(model_path)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise NotFoundError(
            f"the base model {model_path} is neither a folder nor on the hub ({error})"
        ) from error
