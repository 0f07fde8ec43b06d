"""Download one model, tokenizer or dataset: `prefetch` calls `fetch` (`common/interpreters.py`).

It runs in a process of its own, because package huggingface_hub reads the caches and the offline mode from environment
variables when it is imported, and because datasets are prepared by the interpreter that will read them. huggingface_hub
keeps complete files, so an interrupted download continues with the file at which it was interrupted.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import DataError, NotFoundError, PrimerlError
from primerl_hpc.common.files import read_json_or_none, sha256_of, write_json
from primerl_hpc.common.locks import is_stale, no_locks_error
from primerl_hpc.common.waiting import DISK_FULL, repeating
from primerl_hpc.transport.base_models.snapshots import SMALL_FILES, UNREAD_FILES

WEIGHT_FORMATS = (("*.safetensors",), ("*.bin", "*.pt", "*.pth"), ("*.gguf",))
"""Formats of weights, the preferred one first: of a model in several formats only one is fetched."""
REPORT_EVERY_S = 1.0
OLD_S = 86400.0
"""Age of a file of an interrupted download at which it is deleted."""
SPARE_BYTES = 64 * 2**20
_NETWORK = ("httpx", "httpcore", "huggingface_hub")
"""Packages whose errors are those of a download."""
Report = Callable[[list[int]], None]


@dataclass(frozen=True)
class HubFile:
    path: str
    size: int
    sha256: str | None = None
    """None for a small file, which the hub stores in git."""


def choose_files(files: Sequence[HubFile], *, is_tokenizer: bool) -> list[HubFile]:
    """Return the files of a repository that a run reads: its small files, and the weights in one format.

    Weights in subfolders, and ``consolidated*``, are copies in the format of another program.
    """
    top = [file for file in files if not _matches(file, UNREAD_FILES)]
    chosen = [file for file in top if _matches(file, SMALL_FILES)]
    if is_tokenizer:
        return chosen
    for patterns in WEIGHT_FORMATS:
        if weights := [file for file in top if _matches(file, patterns)]:
            return chosen + weights
    return chosen


def _matches(file: HubFile, patterns: Sequence[str]) -> bool:
    return any(fnmatch(file.path, pattern) for pattern in patterns)


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise DataError if the filesystem of ``folder`` has no room for this many bytes more."""
    free = shutil.disk_usage(folder).free
    if num_bytes + SPARE_BYTES > free:
        raise DataError(
            f"{num_bytes / 2**30:,.1f} GiB are missing, but the filesystem has only {free / 2**30:,.1f} GiB free",
            location=str(folder),
            hint="delete models that no run needs (hf cache ls), or set cache.path of the profile to another folder",
        )


def fetch_model(name: str, hub: Path, marker: Path, report: Report, *, is_tokenizer: bool) -> None:
    """Download a model into the hub cache, verify sizes and checksums, and write its marker.

    Raises NotFoundError for a model that the hub does not have, DataError for a full disk or a wrong checksum.
    """
    from huggingface_hub import HfApi, snapshot_download

    info = HfApi().model_info(name, files_metadata=True)
    files = choose_files([_hub_file(entry) for entry in info.siblings or ()], is_tokenizer=is_tokenizer)
    if not files:
        raise NotFoundError(f"{name} has no files that a run can load", hint="check its name")
    hub.mkdir(parents=True, exist_ok=True)
    root = hub / f"models--{name.replace('/', '--')}"
    _delete_interrupted(root / "blobs")
    snapshot = root / "snapshots" / str(info.sha)
    total = sum(file.size for file in files)
    check_space(hub, sum(file.size for file in files if not (snapshot / file.path).is_file()))
    with _reporting(root / "blobs", total, report):
        patterns = [file.path for file in files]
        folder = Path(snapshot_download(name, cache_dir=hub, allow_patterns=patterns))
    if folder.name != info.sha:
        raise DataError(f"{name} changed on the hub during the download", hint="run the command again")
    known = read_json_or_none(marker) or {}
    verified = {file.path: _verify(folder, file, _facts(known), root) for file in files}
    write_json(
        marker, {"name": name, "commit": folder.name, "files": verified, "time": round(time.time(), 3)}
    )


def _hub_file(entry: Any) -> HubFile:
    sha256 = entry.lfs.sha256 if entry.lfs is not None else None
    return HubFile(entry.rfilename, entry.size or 0, sha256)


def _delete_interrupted(blobs: Path) -> None:
    """Delete the files that a killed download left: the next one starts such a file again."""
    with contextlib.suppress(OSError):
        for path in blobs.glob("*.incomplete"):
            if is_stale(path, OLD_S):
                path.unlink(missing_ok=True)


def _facts(marker: Any) -> dict[str, Any]:
    """Return what a marker states about files; nothing if it has another form."""
    files = marker.get("files") if isinstance(marker, dict) else None
    return files if isinstance(files, dict) else {}


def _verify(folder: Path, file: HubFile, known: dict[str, Any], root: Path) -> dict[str, Any]:
    """Return size and checksum of a file. A file that does not match is deleted; raises DataError.

    ``root``: folder of the model in the cache. A link that leads out of it is deleted, but never what it names: others
    may write to a shared cache.
    """
    path = folder / file.path
    if not path.resolve().is_relative_to(root.resolve()):
        path.unlink()
        raise DataError(
            f"{file.path} was a link to a file outside of the cache and was deleted",
            hint="run the command again",
        )
    status = path.stat()
    facts = {"size": status.st_size, "sha256": file.sha256, "mtime_ns": status.st_mtime_ns}
    if known.get(file.path) == facts:
        return facts
    is_right = status.st_size == file.size
    if is_right and file.sha256 is not None:
        is_right = sha256_of(path) == file.sha256
    if not is_right:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise DataError(
            f"{file.path} differs from the hub's checksum and was deleted", hint="run the command again"
        )
    return facts


def _reporting(blobs: Path, total: int, report: Report) -> contextlib.AbstractContextManager[None]:
    """Return a context that reports the number of bytes in ``blobs`` every second."""

    def report_bytes() -> None:
        num_bytes = sum(path.stat().st_size for path in blobs.iterdir())
        report([min(num_bytes, total), total])

    return repeating(REPORT_EVERY_S, report_bytes)


def load_dataset(source: dict[str, Any], marker: Path) -> None:
    """Load a hub dataset as the trainer does, which fills the caches, and write its marker. Raises NotFoundError."""
    from primerl_hpc.recipe.schema.sft import SFTData
    from primerl_hpc.recipe.sft.tables import open_rows

    rows = open_rows(SFTData.model_validate(source))
    write_json(marker, {"name": source["path"], "rows": len(rows), "time": round(time.time(), 3)})


def fetch(request: dict[str, Any], report: Report) -> None:
    """Fetch a need and write its marker. Raises a PrimerlError for each expected error.

        {"kind": "model", "name": "org/model", "hub": "/cache/hub", "marker": "/cache/….json", "source": {}}

    ``report`` is called with the bytes so far and in total every second.
    """
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    kind, marker = request["kind"], Path(request["marker"])
    hint = "run the command again: complete files are kept"
    try:
        if kind == "dataset":
            load_dataset(request["source"], marker)
        else:
            hub, is_tokenizer = Path(request["hub"]), kind == "tokenizer"
            fetch_model(request["name"], hub, marker, report, is_tokenizer=is_tokenizer)
    except PrimerlError:
        raise
    except RepositoryNotFoundError as error:
        raise NotFoundError(
            f"the hub has no {kind} {request['name']}, or it is private",
            hint="check the name; for a private or gated model, log in with: hf auth login",
        ) from error
    except OSError as error:
        if error.errno in DISK_FULL:
            hint = "free some space, and run the command again: complete files are kept"
            raise DataError(f"{error.strerror} ({error.filename or request['hub']})", hint=hint) from error
        no_locks = no_locks_error(error, "huggingface_hub", {"HF_HUB_CACHE": Path(request["hub"])})
        raise no_locks or DataError(_first_line(error), hint=hint) from error
    except Exception as error:
        is_known = isinstance(error, (HfHubHTTPError, OfflineModeIsEnabled, RuntimeError))
        if not is_known and type(error).__module__.partition(".")[0] not in _NETWORK:
            raise
        raise DataError(_first_line(error), hint=hint) from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
