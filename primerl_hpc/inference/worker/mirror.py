"""The engine's local copy of the served shards, which is updated from version to version by applying links.

    folder = Mirror(scratch).update_to(chain, version)      # identical to the full version; raises DataError

Every worker of the engine on the node calls `Mirror.update_to`; the first one does the work while the others wait. From
the shared filesystem it reads only the links, and one full version per incarnation of the engine. The CRC-32 of every
changed shard is compared with that of the full version. On a mismatch the chain's full version is copied and the links
are applied again; if they still do not match, DataError is raised.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from isal import isal_zlib

from primerl_hpc.common.errors import ConfigError, DataError
from primerl_hpc.common.files import listed_file, read_json_or_none, write_json
from primerl_hpc.common.locks import lock_file
from primerl_hpc.transport.weights.delta import OtherShardError, read_link
from primerl_hpc.transport.weights.delta_codec import apply
from primerl_hpc.transport.weights.filesystem import manifest_files
from primerl_hpc.transport.weights.sources import DeltaChain

logger = logging.getLogger(__name__)

COPY_BYTES = 8 << 20
THREADS = 8


class BrokenLinkError(DataError):
    """A link cannot be read. ``version``: the version that it leads to."""

    def __init__(self, cause: str, version: int) -> None:
        super().__init__(cause)
        self.version = version


class Mirror:
    """The shards of one policy version on the engine's node."""

    def __init__(self, folder: Path) -> None:
        """``folder``: an existing folder on the node's own disk that only this engine uses."""
        self.folder, self.weights = folder, folder / "weights"
        self._version_file = folder / "version.json"  # absent while the shards are between two versions

    def update_to(self, chain: DeltaChain, version: int) -> Path:
        """Update the mirror to ``version``. Returns the folder with its shards.

        Raises DataError naming what is damaged; the mirror is then empty or holds an older version.
        """
        with self._lock():
            current = self.version
            if current == version:
                return self.weights
            links = dict(chain.links)
            if (
                current is not None
                and current < version
                and all(number in links for number in range(current + 1, version + 1))
            ):
                try:
                    self._apply_links(links, current, version)
                    return self.weights
                except BrokenLinkError as error:
                    if error.version > chain.base:  # the link is needed after copying the base, too
                        raise
                    logger.warning("%s; copying policy version %d instead", error, chain.base)
                except DataError as error:
                    logger.warning("%s; copying policy version %d again", error, chain.base)
            self._copy(Path(chain.path), chain.base)
            self._apply_links(links, chain.base, version)
            return self.weights

    @property
    def version(self) -> int | None:
        """Policy version of the shards; None if the mirror is empty or an update failed."""
        return (read_json_or_none(self._version_file) or {}).get("version")

    def _copy(self, source: Path, version: int) -> None:
        """Replace the mirror by a full version. Raises DataError if a file differs from its manifest."""
        self._version_file.unlink(missing_ok=True)
        shutil.rmtree(self.weights, ignore_errors=True)
        self.weights.mkdir()
        entries = manifest_files(source)
        with ThreadPoolExecutor(THREADS) as pool:
            list(
                pool.map(
                    lambda entry: _copy_checked(listed_file(source, entry["name"]), self.weights, entry),
                    entries,
                )
            )
        write_json(self._version_file, {"version": version})

    def _apply_links(self, links: dict[int, str], current: int, version: int) -> None:
        for number in range(current + 1, version + 1):
            if number not in links:
                raise DataError(f"the chain to policy version {version} has no link {number}")
            try:
                deltas, result = read_link(Path(links[number]), self._sizes())
            except OtherShardError:
                raise
            except DataError as error:
                raise BrokenLinkError(str(error), number) from error
            self._version_file.unlink(missing_ok=True)
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(lambda shard: self._patch(shard, deltas, result), sorted(deltas)))  # noqa: B023
            write_json(self._version_file, {"version": number})

    def _sizes(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self.weights.iterdir()}

    def _patch(self, shard: str, deltas: dict[str, bytes], result: dict[str, dict[str, Any]]) -> None:
        path = listed_file(self.weights, shard)
        if not path.is_file():
            raise DataError("the shard that a delta applies to does not exist", location=str(path))
        if not path.stat().st_size:
            raise DataError("the shard that a delta applies to is empty", location=str(path))
        data = np.memmap(path, np.uint8, "r+")
        apply(data, deltas[shard])
        if (found := isal_zlib.crc32(data)) != result[shard]["crc32"]:
            raise DataError(
                f"CRC-32 after applying the delta is {found:08x}, but the link's manifest lists "
                f"{result[shard]['crc32']:08x}",
                location=str(path),
            )

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold a lock among the workers of this node. The kernel releases it if the holder dies."""
        fd = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            if not lock_file(fd):
                raise ConfigError(
                    f"{self.folder} is on a filesystem without file locks, which the workers of an engine need",
                    hint="set scratch of the profile to a disk of the node, or weights.transport to filesystem",
                )
            yield
        finally:
            os.close(fd)


def _copy_checked(source: Path, target: Path, entry: dict[str, Any]) -> None:
    crc32 = 0
    try:
        if (found := source.stat().st_size) != entry["size_bytes"]:
            raise DataError(
                f"the file has {found} bytes, but its manifest lists {entry['size_bytes']}",
                location=str(source),
            )
        with source.open("rb") as reader, listed_file(target, entry["name"]).open("wb") as writer:
            while piece := reader.read(COPY_BYTES):
                crc32 = isal_zlib.crc32(piece, crc32)
                writer.write(piece)
    except OSError as error:
        raise DataError(f"cannot be copied ({error})", location=str(source)) from error
    if crc32 != entry["crc32"]:
        raise DataError(
            f"CRC-32 is {crc32:08x}, but the manifest lists {entry['crc32']:08x}", location=str(source)
        )
