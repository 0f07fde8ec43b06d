"""An engine's own copy of the shards it serves, on its node, which links bring from version to version.

    folder = Mirror(scratch).bring_to(chain, version)      # byte for byte the whole version; raises DataError

Every worker of the engine on the node calls it; the first one does the work, the others wait. A shared filesystem is read for the
links alone, and for a whole version once in an engine's life. Every changed shard is checked against the CRC-32 of the whole
version's; what does not fit is copied anew from the chain's folder, and when this does not help either, the chain is broken.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from isal import isal_zlib

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import read_json, read_json_or_none, write_json
from primerl_hpc.transport.delta_codec import apply
from primerl_hpc.transport.weights import Chain
from primerl_hpc.transport.weights_delta import read_link
from primerl_hpc.transport.weights_filesystem import MANIFEST

logger = logging.getLogger(__name__)

COPY_BYTES = 8 << 20
THREADS = 8


class BrokenLinkError(DataError):
    def __init__(self, cause: str, version: int) -> None:
        super().__init__(cause)
        self.version = version


class Mirror:
    def __init__(self, folder: Path) -> None:
        """``folder`` is on the node itself, there already, and this engine's alone."""
        self.folder, self.weights = folder, folder / "weights"
        self._note = folder / "version.json"  # not there while the shards are between two versions

    def bring_to(self, chain: Chain, version: int) -> Path:
        """A model folder of ``version``. Raises DataError saying what is broken; the mirror is empty then, or older."""
        with self._lock():
            if self.version == version:
                return self.weights
            links = dict(chain.links)
            at = self.version
            if at is not None and at < version and all(each in links for each in range(at + 1, version + 1)):
                try:
                    self._apply_links(links, at, version)
                    return self.weights
                except BrokenLinkError as error:
                    if error.version > chain.base:  # from there it is needed as well
                        raise
                    logger.warning("%s; policy version %d is copied", error, chain.base)
                except DataError as error:
                    logger.warning("%s; policy version %d is copied anew", error, chain.base)
            self._copy(Path(chain.path), chain.base)
            self._apply_links(links, chain.base, version)
            return self.weights

    @property
    def version(self) -> int | None:
        """The one that the shards are of."""
        return (read_json_or_none(self._note) or {}).get("version")

    def _copy(self, source: Path, version: int) -> None:
        self._note.unlink(missing_ok=True)
        shutil.rmtree(self.weights, ignore_errors=True)
        self.weights.mkdir()
        entries = read_json(source / MANIFEST)["files"]
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda entry: _copy_checked(source / entry["name"], self.weights, entry), entries))
        write_json(self._note, {"version": version})

    def _apply_links(self, links: dict[int, str], at: int, version: int) -> None:
        for each in range(at + 1, version + 1):
            if each not in links:
                raise DataError(f"the chain to policy version {version} has no link {each}")
            try:
                deltas, result = read_link(Path(links[each]))
            except DataError as error:
                raise BrokenLinkError(str(error), each) from error
            self._note.unlink(missing_ok=True)
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(lambda shard: self._patch(shard, deltas, result), sorted(deltas)))  # noqa: B023
            write_json(self._note, {"version": each})

    def _patch(self, shard: str, deltas: dict[str, bytes], result: dict[str, dict[str, Any]]) -> None:
        path = self.weights / shard
        if not path.is_file():
            raise DataError("a delta for a shard that is not there", place=str(path))
        data = np.memmap(path, np.uint8, "r+")
        apply(data, deltas[shard])
        if (found := isal_zlib.crc32(data)) != result[shard]["crc32"]:
            raise DataError(
                f"CRC-32 is {found:08x} after its delta, the version's is {result[shard]['crc32']:08x}",
                place=str(path),
            )

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Among the workers of this node, on its own filesystem; given back by the system when one dies."""
        fd = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _copy_checked(source: Path, target: Path, entry: dict[str, Any]) -> None:
    crc32 = 0
    try:
        with source.open("rb") as reader, (target / entry["name"]).open("wb") as writer:
            while piece := reader.read(COPY_BYTES):
                crc32 = isal_zlib.crc32(piece, crc32)
                writer.write(piece)
    except OSError as error:
        raise DataError(f"cannot be copied ({error})", place=str(source)) from error
    if crc32 != entry["crc32"]:
        raise DataError(f"CRC-32 is {crc32:08x}, its manifest says {entry['crc32']:08x}", place=str(source))
