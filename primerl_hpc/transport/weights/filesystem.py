"""Weights in the run directory: ``weights/step_N/``, a model folder with ``manifest.json`` and ``STABLE``.

If the run trains adapters, the folder holds only the adapter, in PEFT's format.

The trainer's ranks write to one temporary folder, which the leader then commits:

    writer = WeightWriter(run, version=3)
    writer.begin()                                          # leader, then a barrier
    save_file(tensors, writer.shard_path(2, of=5))          # the rank that owns shard 2
    entry = writer.finish_file(writer.shard_path(2, of=5))  # fsync, size, CRC-32
    entries.append(writer.write_index(weight_map, total_bytes=…))
    writer.commit(entries)                                  # leader, after a barrier

A reader opens a version, which checks and leases it, and closes it once the engines have loaded the weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import (
    crc32_of_file,
    fsync_dir,
    is_there,
    listed_file,
    read_json,
    write_json,
    write_text,
)
from primerl_hpc.common.model_files import INDEX
from primerl_hpc.common.safety.decoding import decoding, file_entries
from primerl_hpc.common.waiting import Polling
from primerl_hpc.run.leases import lease_path, renew_lease
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import STABLE, all_steps
from primerl_hpc.transport.base_models.quantized import without_quantization
from primerl_hpc.transport.weights.sources import Source

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
ADAPTER_PREFIX = "base_model.model."  # PEFT's prefix of the base model's tensor names
LAG_S = 30.0  # time limit for a network filesystem to show a file and its size once its marker is visible
POLL_S = 0.2

COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".py", ".tiktoken")
"""Suffixes of the files that an engine needs in addition to weights: config, tokenizer, template, remote code."""

CONFIGS = ("config.json", "generation_config.json")


class FolderWriter:
    """Write the folder of a version under a temporary name: once ``STABLE`` exists, the folder is complete."""

    def __init__(self, run: RunDir, version: int, folder: Path) -> None:
        self.run, self.version, self.folder = run, version, folder
        self.temporary = folder.with_name(f"{folder.name}.tmp")

    def begin(self) -> None:
        """Create an empty temporary folder; delete what an earlier incarnation left there."""
        self.discard()
        self.temporary.mkdir(parents=True)

    def discard(self) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)

    def finish(self, manifest: dict[str, Any]) -> Path:
        """Write the manifest, rename the folder and mark it stable. Returns the folder."""
        write_json(self.temporary / MANIFEST, manifest)
        fsync_dir(self.temporary)
        self._clear()
        os.rename(self.temporary, self.folder)
        fsync_dir(self.folder.parent)
        write_text(self.folder / STABLE, "")
        return self.folder

    def _clear(self) -> None:
        """Move an earlier incarnation's folder away. If it is leased, `RunDir.delete_dropped` deletes it later."""
        (self.folder / STABLE).unlink(missing_ok=True)
        old = self.folder.with_name(f"{self.folder.name}.{time.time_ns()}.tmp")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.folder, old)
        if not self.run.has_lease(self.folder):
            shutil.rmtree(old, ignore_errors=True)


class WeightWriter(FolderWriter):
    def __init__(self, run: RunDir, version: int) -> None:
        super().__init__(run, version, run.weights_step(version))

    def shard_path(self, number: int, *, of: int) -> Path:
        """Return the path of shard ``number`` (1-based)."""
        return self.temporary / f"model-{number:05d}-of-{of:05d}.safetensors"

    @staticmethod
    def finish_file(path: Path) -> dict[str, Any]:
        """fsync a file. Returns its manifest entry ``{name, size_bytes, crc32}``."""
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return WeightWriter.entry(path, crc32_of_file(path))

    @staticmethod
    def entry(path: Path, crc32: int) -> dict[str, Any]:
        """Return the manifest entry of a file that is already synced to disk."""
        return {"name": path.name, "size_bytes": path.stat().st_size, "crc32": crc32}

    def copy_model_files(
        self, model_folder: Path, *, dtype: str, tokenizer_folder: Path | None = None
    ) -> list[dict[str, Any]]:
        """Copy config, tokenizer and similar files. Returns their manifest entries.

        Files that the previous version has with the same size are hard links to it, which costs the filesystem neither
        bytes nor a sync for each version; where there are no hard links, they are copied.
        ``dtype``: the type of the exported weights, which is written into ``config.json``.
        ``tokenizer_folder``: if given, copy everything except configs and code from this folder instead.
        """
        sources = [path for path in model_folder.iterdir() if path.suffix in COPIED_SUFFIXES]
        if tokenizer_folder is not None:
            sources = [path for path in sources if path.name in CONFIGS or path.suffix == ".py"]
            others = [path for path in tokenizer_folder.iterdir() if path.suffix in COPIED_SUFFIXES]
            sources += [path for path in others if path.name not in CONFIGS and path.suffix != ".py"]
        entries, earlier = [], self._entries_of_previous()
        for source in sorted(sources, key=lambda path: path.name):
            is_weight_index = source.name.endswith(".index.json") or source.name == MANIFEST
            if is_weight_index or not source.is_file():
                continue
            target = self.temporary / source.name
            if source.name == "config.json":
                config = without_quantization(read_json(source))
                config.pop("torch_dtype", None)
                target.write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
            elif self._link(entry := earlier.get(source.name), source, target):
                entries.append(entry)
                continue
            else:
                shutil.copyfile(source, target)
            entries.append(self.finish_file(target))
        return entries

    @property
    def _previous(self) -> Path:
        return self.run.weights_step(self.version - 1)

    def _entries_of_previous(self) -> dict[str, dict[str, Any]]:
        """Return the manifest entries of the previous version by name; empty if it is not there or incomplete."""
        try:
            return {entry["name"]: entry for entry in manifest_files(self._previous)}
        except (OSError, DataError, ValueError):
            return {}

    def _link(self, entry: dict[str, Any] | None, source: Path, target: Path) -> bool:
        """Link ``target`` to the previous version's file. Returns False if that one is damaged or cannot be linked."""
        if entry is None or entry["size_bytes"] != source.stat().st_size:
            return False
        try:
            os.link(self._previous / source.name, target)
            if crc32_of_file(target) == entry["crc32"]:
                return True
        except OSError:
            pass
        target.unlink(missing_ok=True)
        return False

    def write_index(self, weight_map: dict[str, str], *, total_bytes: int) -> dict[str, Any]:
        """Write the index of the shards. ``weight_map``: tensor name → file name. Returns its manifest entry."""
        index = self.temporary / INDEX
        content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(index, content)
        return self.finish_file(index)

    def commit(self, entries: list[dict[str, Any]]) -> Path:
        """Finish the folder. ``entries``: the manifest entries of all files in it. Returns the folder."""
        files = sorted(entries, key=lambda entry: entry["name"])
        return self.finish(
            {"manifest_version": MANIFEST_VERSION, "policy_version": self.version, "files": files}
        )


def write_blank_adapter(run: RunDir, like: Path) -> Path:
    """Write version 0 of ``run``: an adapter of zeros, which does not change the base model. Returns its folder.

    ``like``: a folder with an adapter of the same shapes.
    """
    writer = WeightWriter(run, 0)
    writer.begin()
    with (like / ADAPTER_WEIGHTS).open("rb") as file:
        size = file.read(8)
        header = file.read(int.from_bytes(size, "little"))
        num_bytes = os.fstat(file.fileno()).st_size
    with (writer.temporary / ADAPTER_WEIGHTS).open("wb") as file:
        file.write(size + header)
        file.truncate(num_bytes)
    shutil.copyfile(like / ADAPTER_CONFIG, writer.temporary / ADAPTER_CONFIG)
    names = (ADAPTER_WEIGHTS, ADAPTER_CONFIG)
    return writer.commit([writer.finish_file(writer.temporary / name) for name in names])


def prune_weights(run: RunDir, *, keep_last: int, keep: set[int]) -> list[int]:
    """Delete all stable versions except the newest ``keep_last``, those in ``keep`` and leased ones.

    Also deletes folders that were replaced while they were leased (`RunDir.delete_dropped`). Returns the deleted
    versions.
    """
    run.delete_dropped(run.weights)
    versions = run.stable_weights()
    deleted = []
    for version in versions[: max(len(versions) - keep_last, 0)]:
        if version not in keep and not run.has_lease(run.weights_step(version)):
            run.delete_step(run.weights_step(version), STABLE)
            deleted.append(version)
    return deleted


class FilesystemWeightReader:
    def __init__(self, run: RunDir, *, lag_s: float = LAG_S, weights: Path | None = None) -> None:
        """``weights``: the folder that holds ``step_N``; None: the run's own."""
        self.run, self.lag_s, self.weights = run, lag_s, weights or run.weights

    def versions(self) -> list[int]:
        """Return the stable versions, ascending."""
        return self.run.list_steps(self.weights, STABLE)

    def newest(self) -> int | None:
        """Return the newest stable version; earlier ones are not checked."""
        for version in reversed(all_steps(self.weights)):
            if is_there(self.weights / f"step_{version}" / STABLE):
                return version
        return None

    def has(self, version: int) -> bool:
        return version in self.versions()

    def request_full(self) -> bool:
        return False  # every version is a full folder already

    def give_up(self, version: int, source: Source) -> None:
        raise DataError(f"no engine can load policy version {version}", location=str(source))

    def open(self, version: int, reader: str) -> Any:
        """Return the version's folder, see `WeightReader.open`.

        Waits up to ``lag_s`` for a filesystem that shows the marker before the files.
        """
        folder = self.weights / f"step_{version}"
        if not is_there(folder / STABLE):
            raise DataError(f"policy version {version} has no {STABLE}", location=str(folder))
        with contextlib.suppress(PermissionError):  # another user's run: read it without a lease
            self.run.lease(folder, reader)
        try:
            self._check(folder)
        except DataError:
            self.close(version, reader)
            raise
        return folder

    def close(self, version: int, reader: str) -> None:
        with contextlib.suppress(PermissionError):
            self._lease_path(version, reader).unlink(missing_ok=True)

    def renew(self, version: int, reader: str) -> None:
        renew_lease(self._lease_path(version, reader))

    def _lease_path(self, version: int, reader: str) -> Path:
        return lease_path(self.weights / f"step_{version}", reader)

    def _check(self, folder: Path) -> None:
        if fault := wait_while(lambda: manifest_fault(folder), self.lag_s):
            raise DataError(f"{STABLE} exists, but {fault}", location=str(folder))


def manifest_files(folder: Path) -> list[dict[str, Any]]:
    """Return the manifest's entries, ``{"name", "size_bytes", "crc32"}`` each.

    Raises DataError if the manifest is malformed and FileNotFoundError if it is missing.
    """
    manifest = read_json(folder / MANIFEST)
    with decoding("malformed manifest", location=folder / MANIFEST):
        return file_entries(manifest["files"])


def manifest_fault(folder: Path) -> str:
    """Return how ``folder`` differs from its manifest; empty if it does not.

    Raises DataError as `manifest_files`, and for a name with a folder.
    """
    if not is_there(folder / MANIFEST):
        return f"{MANIFEST} is missing"
    entries = manifest_files(folder)
    for entry in entries:
        listed_file(folder, entry["name"])  # its error is final: `files_fault` describes what a lag explains
    return files_fault(folder, entries, "its manifest")


def files_fault(folder: Path, entries: list[dict[str, Any]], list_name: str) -> str:
    """Describe the first listed file that is missing or has another size; empty if all match."""
    for entry in entries:
        try:
            path = listed_file(folder, entry["name"])
        except DataError as error:
            return error.cause
        if not is_there(path):
            return f"{path.name} is missing"
        if (size := path.stat().st_size) != entry["size_bytes"]:
            return f"{path.name} has {size} bytes, but {list_name} lists {entry['size_bytes']}"
    return ""


def wait_while(fault: Callable[[], str], lag_s: float) -> str:
    """Call ``fault`` until it returns an empty string, for up to ``lag_s`` seconds. Returns its last result."""
    return Polling(lag_s, POLL_S).last(fault, lambda found: not found)
