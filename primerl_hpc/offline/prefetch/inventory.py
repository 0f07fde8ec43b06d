"""Look for a run's needs in the caches. Nothing is written, and nothing is asked over the network.

    look(need).state        # COMPLETE, PARTIAL, MISSING, or UNKNOWN: only loading it would show

A marker is written by `fetch` after all files of a model were verified, and after a dataset or the tasks of an
environment were loaded. A model without a marker, which another program has downloaded, is complete if its snapshot has
a configuration and all files of its index of weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import listed_file, read_json_or_none
from primerl_hpc.common.model_files import INDEX, check_pointers, read_weights
from primerl_hpc.common.safety.decoding import decoding
from primerl_hpc.offline.prefetch.needs import Need, NeedKind
from primerl_hpc.recipe.hub import is_hub_id
from primerl_hpc.transport.base_models.hub_cache import cache_folder, datasets_folder

WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "*.tiktoken")


class Presence(StrEnum):
    COMPLETE = "complete"
    PARTIAL = "partial"
    MISSING = "missing"
    UNKNOWN = "unknown"
    """Not known without loading it."""


@dataclass(frozen=True)
class Found:
    """The state of a need in the caches."""

    state: Presence
    detail: str = ""
    """Reason for a state other than complete; else where it is."""
    num_bytes: int = 0

    @property
    def is_complete(self) -> bool:
        return self.state == Presence.COMPLETE


def marker_path(need: Need) -> Path:
    """Return the file which states that this need was fetched and verified."""
    digest = hashlib.sha256(json.dumps(dict(need.source), sort_keys=True).encode()).hexdigest()[:12]
    name = re.sub(r"[^\w.-]+", "--", need.name)
    return markers_folder(need.variables) / f"{need.kind}s--{name}--{digest}.json"


def markers_folder(variables: Mapping[str, str]) -> Path:
    """Return the folder of markers and of the lock, next to the hub cache."""
    return cache_folder(variables).parent / "primerl-prefetch"


def look(need: Need) -> Found:
    """Return the state of a model, tokenizer, dataset or environment."""
    if need.kind in (NeedKind.MODEL, NeedKind.TOKENIZER):
        return look_for_model(need)
    if need.kind == NeedKind.DATASET:
        return look_for_dataset(need)
    return look_for_tasks(need)


def repository_folder(need: Need) -> Path:
    """Return the folder of a model in the cache of package huggingface_hub."""
    return cache_folder(need.variables) / f"models--{need.name.replace('/', '--')}"


def look_for_model(need: Need) -> Found:
    root = repository_folder(need)
    try:
        commit = (root / "refs" / "main").read_text().strip()
        snapshot = listed_file(root / "snapshots", commit)
    except OSError:
        is_started = root.is_dir()
        state = Presence.PARTIAL if is_started else Presence.MISSING
        return Found(state, "its download was not finished" if is_started else f"not in {root.parent}")
    with contextlib.suppress(DataError), decoding("not a marker", location=marker_path(need)):
        marker = read_json_or_none(marker_path(need)) or {}
        if marker.get("commit") == commit:
            return _compare(snapshot, marker["files"])
    try:
        if missing := lacking_file(snapshot, is_tokenizer=need.kind == NeedKind.TOKENIZER):
            return Found(Presence.PARTIAL, f"{snapshot} has no {missing}")
    except DataError as error:
        return Found(Presence.PARTIAL, f"{error.location}: {error.cause}")
    return Found(Presence.COMPLETE, str(snapshot), _size(snapshot))


def _compare(snapshot: Path, files: Mapping[str, Any]) -> Found:
    """Compare the files with the sizes in a marker: a purge may have deleted some."""
    total = 0
    for name, facts in files.items():
        try:
            size = listed_file(snapshot, name).stat().st_size
        except OSError:
            return Found(Presence.PARTIAL, f"{snapshot / name} was deleted")
        if size != facts["size"]:
            return Found(Presence.PARTIAL, f"{snapshot / name} has {size} bytes, not {facts['size']}")
        total += size
    return Found(Presence.COMPLETE, str(snapshot), total)


def lacking_file(folder: Path, *, is_tokenizer: bool) -> str:
    """Return what a model folder lacks; empty if it is complete. Raises DataError for a file that is incomplete."""
    if is_tokenizer:
        return "" if any(any(folder.glob(name)) for name in TOKENIZERS) else "tokenizer"
    if not (folder / "config.json").is_file():
        return "config.json"
    if (folder / INDEX).is_file() or any(folder.glob("*.safetensors")):
        check_pointers(folder)
        read_weights(folder)
        return ""
    has_weights = any(path.is_file() for pattern in WEIGHTS for path in folder.glob(pattern))
    return "" if has_weights else "weights"


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def look_for_dataset(need: Need) -> Found:
    """Return COMPLETE for a dataset that was loaded, by `fetch` or by another program."""
    marker = read_json_or_none(marker_path(need))
    folder = datasets_folder(need.variables)
    prepared = [path for path in _entries(folder) if _plain(path.name) == _plain(need.name)]
    if (subset := need.source.get("subset")) is not None:
        prepared = [
            path for dataset in prepared for path in _entries(dataset) if _plain(path.name) == _plain(subset)
        ]
    if prepared:
        return Found(Presence.COMPLETE, str(prepared[0]), (marker or {}).get("bytes", 0))
    return Found(Presence.MISSING, f"not in {folder}" if marker is None else f"deleted from {folder}")


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def _plain(name: str) -> str:
    """Compare names as package datasets changes them: ``Org/MyRows`` is in the folder ``Org___my_rows``."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def look_for_tasks(need: Need) -> Found:
    """Return UNKNOWN for an environment that was never loaded here, unless it is shipped and generates its tasks."""
    marker = read_json_or_none(marker_path(need))
    if marker is not None:
        return Found(Presence.COMPLETE, f"{marker.get('tasks')} tasks were loaded")
    if is_shipped(need.name):
        hub_ids = [value for value in need.source["args"].values() if isinstance(value, str)]
        if not any(is_hub_id(value, Path.cwd()) for value in hub_ids):
            return Found(Presence.COMPLETE, "generates its tasks")
        return Found(Presence.MISSING, "its dataset was not fetched with this command")
    return Found(Presence.UNKNOWN, "its tasks were never loaded into this cache")


def is_shipped(environment_id: str) -> bool:
    """True for an environment of this package, by verifiers' rule for the module of an id."""
    module = environment_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    return resources.files("primerl_hpc.envs").joinpath("shipped", module, "__init__.py").is_file()
