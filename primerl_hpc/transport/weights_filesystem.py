"""Weights through the run directory: ``weights/step_N/``, an HF model folder with ``manifest.json`` and ``STABLE``.

Of a run that trains adapters it holds these alone, in PEFT's format.

The trainer's ranks fill one temporary folder together; its leader then commits it:

    writer = WeightWriter(run, version=3)
    writer.begin()                                          # leader, then a barrier
    save_file(tensors, writer.shard_path(2, of=5))          # whoever owns shard 2
    entry = writer.finish_file(writer.shard_path(2, of=5))  # fsync, size, CRC-32
    entries.append(writer.write_index(weight_map, total_bytes=…))
    writer.commit(entries)                                  # leader, after a barrier

An engine opens a version, which is checked and leased, and closes it when the weights are in memory.
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
from primerl_hpc.common.files import crc32_of_file, fsync_dir, is_there, read_json, write_json, write_text
from primerl_hpc.common.leases import lease_path, renew_lease
from primerl_hpc.common.rundir import STABLE, RunDir
from primerl_hpc.transport.weights import Source

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
INDEX = "model.safetensors.index.json"
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
ADAPTER_PREFIX = "base_model.model."  # PEFT's, before the base model's own names
LAG_S = 30.0  # how long a network filesystem may hide a file, or show an old size, behind the marker
POLL_S = 0.2

COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".py", ".tiktoken")
"""What of the base model's folder an engine needs besides weights: config, tokenizer, template, remote code."""

CONFIGS = ("config.json", "generation_config.json")


class FolderWriter:
    """A version's folder, filled beside its name: whoever sees ``STABLE`` sees all of it."""

    def __init__(self, run: RunDir, version: int, folder: Path) -> None:
        self.run, self.version, self.folder = run, version, folder
        self.temporary = folder.with_name(f"{folder.name}.tmp")

    def begin(self) -> None:
        """Make the temporary folder, empty, whatever an earlier life left there."""
        self.discard()
        self.temporary.mkdir(parents=True)

    def discard(self) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)

    def finish(self, manifest: dict[str, Any]) -> Path:
        """Write the manifest, rename the folder, mark it stable."""
        write_json(self.temporary / MANIFEST, manifest)
        fsync_dir(self.temporary)
        self._clear()
        os.rename(self.temporary, self.folder)
        fsync_dir(self.folder.parent)
        write_text(self.folder / STABLE, "")
        return self.folder

    def _clear(self) -> None:
        """Move the folder of an earlier life out of the way. What somebody reads is deleted later: `RunDir.delete_dropped`."""
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
        """Path of shard ``number`` (1-based)."""
        return self.temporary / f"model-{number:05d}-of-{of:05d}.safetensors"

    @staticmethod
    def finish_file(path: Path) -> dict[str, Any]:
        """Make a written file durable; its manifest entry ``{name, size_bytes, crc32}``."""
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return WeightWriter.entry(path, crc32_of_file(path))

    @staticmethod
    def entry(path: Path, crc32: int) -> dict[str, Any]:
        """Manifest entry of a file that is durable already."""
        return {"name": path.name, "size_bytes": path.stat().st_size, "crc32": crc32}

    def copy_model_files(
        self, model_folder: Path, *, dtype: str, tokenizer_folder: Path | None = None
    ) -> list[dict[str, Any]]:
        """Copy config, tokenizer and the like; ``config.json`` says the exported dtype. Returns manifest entries.

        With ``tokenizer_folder`` all but config and code is from there.
        """
        sources = [each for each in model_folder.iterdir() if each.suffix in COPIED_SUFFIXES]
        if tokenizer_folder is not None:
            sources = [each for each in sources if each.name in CONFIGS or each.suffix == ".py"]
            others = [each for each in tokenizer_folder.iterdir() if each.suffix in COPIED_SUFFIXES]
            sources += [each for each in others if each.name not in CONFIGS and each.suffix != ".py"]
        entries = []
        for source in sorted(sources, key=lambda each: each.name):
            is_weight_index = source.name.endswith(".index.json") or source.name == MANIFEST
            if is_weight_index or not source.is_file():
                continue
            target = self.temporary / source.name
            if source.name == "config.json":
                config = {name: value for name, value in read_json(source).items() if name != "torch_dtype"}
                target.write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
            else:
                shutil.copyfile(source, target)
            entries.append(self.finish_file(target))
        return entries

    def write_index(self, weight_map: dict[str, str], *, total_bytes: int) -> dict[str, Any]:
        """``weight_map``: tensor name → file name. Returns the index's own manifest entry."""
        index = self.temporary / INDEX
        content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(index, content)
        return self.finish_file(index)

    def commit(self, entries: list[dict[str, Any]]) -> Path:
        """``entries``: of all files in the folder."""
        files = sorted(entries, key=lambda entry: entry["name"])
        return self.finish(
            {"manifest_version": MANIFEST_VERSION, "policy_version": self.version, "files": files}
        )


def write_blank_adapter(run: RunDir, like: Path) -> Path:
    """Version 0 of ``run``: an adapter of zeros, which leaves the base model as it is, in the shapes of the one in ``like``."""
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
    """Delete stable versions beyond the newest ``keep_last``, but none of ``keep`` and none that is leased; and what was dropped."""
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
        """``weights``: the folder of ``step_N`` where it is not the run's own."""
        self.run, self.lag_s, self.weights = run, lag_s, weights or run.weights

    def versions(self) -> list[int]:
        """Those that are stable, ascending."""
        return self.run.list_steps(self.weights, STABLE)

    def newest(self) -> int | None:
        return max(self.versions(), default=None)

    def has(self, version: int) -> bool:
        return version in self.versions()

    def ask_for_whole(self) -> bool:
        return False  # they all are

    def give_up(self, version: int, source: Source) -> None:
        raise DataError(f"no engine takes policy version {version}", place=str(source))

    def open(self, version: int, reader: str) -> Any:
        """Its folder, see `WeightReader.open`. A lagging filesystem is waited for; then DataError names marker and file."""
        folder = self.weights / f"step_{version}"
        if not is_there(folder / STABLE):
            raise DataError(f"policy version {version} has no {STABLE}", place=str(folder))
        with contextlib.suppress(PermissionError):  # somebody else's run: its owner keeps it, or nobody does
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
            raise DataError(f"{STABLE} is there, but {fault}", place=str(folder))


def manifest_fault(folder: Path) -> str:
    """What keeps ``folder`` from being what its manifest says; empty when nothing does."""
    if not is_there(folder / MANIFEST):
        return f"{MANIFEST} is missing"
    return files_fault(folder, read_json(folder / MANIFEST)["files"], "its manifest")


def files_fault(folder: Path, entries: list[dict[str, Any]], list_name: str) -> str:
    """The first of the listed files that is missing or of another size; empty when none is."""
    for entry in entries:
        path = folder / entry["name"]
        if not is_there(path):
            return f"{path.name} is missing"
        if (size := path.stat().st_size) != entry["size_bytes"]:
            return f"{path.name} has {size} bytes, {list_name} says {entry['size_bytes']}"
    return ""


def wait_while(fault: Callable[[], str], lag_s: float) -> str:
    """The fault that is still there when a lagging filesystem has had its time; empty once there is none."""
    deadline = time.monotonic() + lag_s
    while (found := fault()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return found


def verify_checksums(folder: Path) -> None:
    """Read every file and compare its CRC-32 with the manifest. Raises DataError naming the first that differs."""
    for entry in read_json(folder / MANIFEST)["files"]:
        if (found := crc32_of_file(folder / entry["name"])) != entry["crc32"]:
            raise DataError(
                f"CRC-32 is {found:08x}, its manifest says {entry['crc32']:08x}",
                place=str(folder / entry["name"]),
            )
