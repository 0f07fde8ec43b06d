"""Weights as chains of links: every version is stored as the difference to the previous one, some also as full folders.

The link ``deltas/step_N/`` holds one file per changed shard of version N (`delta_codec`) and ``manifest.json``, which
lists size and CRC-32 of the delta files and of every shard of version N. Applying it to the shards of version N - 1
yields those of version N byte for byte, which the reader verifies by the CRC-32.

    link = LinkWriter(run, version=3)
    link.begin()                                                            # leader, then a barrier
    entry = link.write("model-00001-of-00005.safetensors", encode(old, new, word_bytes=2))
    link.commit(entries, result)                                            # leader, after a barrier

Full folders are written every ``weights.full_interval`` versions, at checkpoints, and for the first version of a
trainer's incarnation and the last version of the run. This bounds the length of a chain, and export, evaluation and
resume need to read only model folders.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isal import isal_zlib

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import is_there, listed_file, read_json, write_text
from primerl_hpc.common.safety.decoding import decoding, file_entries
from primerl_hpc.run.leases import renew_lease
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import STABLE
from primerl_hpc.transport.weights.delta_codec import max_delta_bytes
from primerl_hpc.transport.weights.filesystem import (
    MANIFEST,
    FilesystemWeightReader,
    FolderWriter,
    prune_weights,
)
from primerl_hpc.transport.weights.sources import DeltaChain, Source

LINK_VERSION = 1
SUFFIX = ".delta"


class LinkWriter(FolderWriter):
    def __init__(self, run: RunDir, version: int) -> None:
        super().__init__(run, version, run.delta_step(version))

    def write(self, shard: str, delta: bytes) -> dict[str, Any]:
        """Write and fsync the delta of ``shard``. Returns its manifest entry."""
        path = self.temporary / f"{shard}{SUFFIX}"
        with path.open("wb") as file:
            file.write(delta)
            file.flush()
            os.fsync(file.fileno())
        return {"name": path.name, "size_bytes": len(delta), "crc32": isal_zlib.crc32(delta)}

    def commit(self, entries: list[dict[str, Any]], result: list[dict[str, Any]]) -> Path:
        """Finish the link. ``entries``: manifest entries of the delta files; ``result``: of all resulting shards."""
        return self.finish(
            {
                "manifest_version": LINK_VERSION,
                "policy_version": self.version,
                "files": sorted(entries, key=lambda entry: entry["name"]),
                "result": sorted(result, key=lambda entry: entry["name"]),
            }
        )


class OtherShardError(DataError):
    """The local shard is not the one that the link applies to."""


def read_link(
    folder: Path, sizes: Mapping[str, int] | None = None
) -> tuple[dict[str, bytes], dict[str, dict[str, Any]]]:
    """Read a link. Returns the deltas by shard name, and the manifest entries of all resulting shards by name.

    ``sizes``: bytes of the shards that the link will be applied to. Files that are larger than a delta of their shard
    can be are not read. Raises DataError naming a file that is missing or differs from the link's manifest,
    OtherShardError if a size in ``sizes`` differs from the manifest.
    """
    with decoding("incomplete or damaged link", location=folder, more=(OSError,)):
        manifest = read_json(folder / MANIFEST)
        result = {entry["name"]: entry for entry in file_entries(manifest["result"])}
        deltas = {}
        for entry in file_entries(manifest["files"]):
            path, shard = listed_file(folder, entry["name"]), entry["name"].removesuffix(SUFFIX)
            shard_bytes = result[shard]["size_bytes"]
            if sizes is not None and sizes.get(shard) != shard_bytes:
                raise OtherShardError(
                    f"the delta applies to {shard} of {shard_bytes} bytes; "
                    + (
                        f"the local shard has {sizes[shard]}"
                        if shard in sizes
                        else "there is no such local shard"
                    ),
                    location=str(path),
                )
            _check_size(path, entry, shard_bytes)
            data = path.read_bytes()
            if len(data) != entry["size_bytes"] or isal_zlib.crc32(data) != entry["crc32"]:
                raise DataError("size or CRC-32 does not match the link's manifest", location=str(path))
            deltas[shard] = data
        return deltas, result


def _check_size(path: Path, entry: dict[str, Any], shard_bytes: int) -> None:
    """Raise DataError if the file differs in size from the manifest, or is too large to be a delta of its shard."""
    if (found := path.stat().st_size) != entry["size_bytes"] or found > max_delta_bytes(shard_bytes):
        raise DataError(
            f"size or CRC-32 does not match the link's manifest: the file has {found} bytes, the manifest lists "
            f"{entry['size_bytes']}, and a delta of this shard has at most {max_delta_bytes(shard_bytes)}",
            location=str(path),
        )


class DeltaWeightReader(FilesystemWeightReader):
    """Versions that are full folders or can be reached from one by links."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(run)
        self._bad_links: set[int] = set()
        self._bad_folders: set[int] = set()
        self._held: dict[tuple[int, str], set[Path]] = {}  # leases by version and reader

    def has(self, version: int) -> bool:
        return self._base_of(version, self._folders(), self._links()) is not None

    def newest(self) -> int | None:
        folders, links = self._folders(), self._links()
        reachable = (
            version
            for version in sorted(folders | links, reverse=True)
            if self._base_of(version, folders, links) is not None
        )
        return next(reachable, None)

    def open(self, version: int, reader: str) -> DeltaChain:
        """Return the newest full version up to ``version`` and all stored links up to it, see `WeightReader.open`.

        The links include those before the full version, for engines that have an older version.
        """
        folders, links = self._folders(), self._links()
        base = self._base_of(version, folders, links)
        if base is None:
            raise DataError(
                f"policy version {version} is neither a full folder with {STABLE} nor linked to one",
                location=str(self.run.weights_step(version)),
            )
        try:
            path = super().open(base, reader)
        except DataError:
            super().close(base, reader)
            raise
        first = version
        while first in links and first - 1 in folders | links:
            first -= 1
        chain = [number for number in range(first, version + 1) if number in links]
        leases = {self.run.lease(self.run.delta_step(number), reader) for number in chain}
        self._held[version, reader] = leases | {self.run.lease(path, reader)}
        for number in range(base + 1, version + 1):
            if not is_there(self.run.delta_step(number) / STABLE):
                self.close(version, reader)
                raise DataError(
                    "the link was deleted while it was opened", location=str(self.run.delta_step(number))
                )
        folders_by_version = ((number, str(self.run.delta_step(number))) for number in chain)
        return DeltaChain(str(path), base, tuple(folders_by_version))

    def close(self, version: int, reader: str) -> None:
        """Release the leases of a version, except those that another open version shares."""
        for lease in self._held.pop((version, reader), set()).difference(*self._held.values()):
            lease.unlink(missing_ok=True)

    def renew(self, version: int, reader: str) -> None:
        for lease in self._held.get((version, reader), ()):
            renew_lease(lease)

    def request_full(self) -> bool:
        write_text(self.run.full_weights_request, "")
        return True

    def give_up(self, version: int, source: Source) -> None:
        """Exclude the link, and the full folder if it exists now; a full folder written later can be opened."""
        if version in self._folders():
            self._bad_folders.add(version)
        self._bad_links.add(version)

    def _folders(self) -> set[int]:
        return set(self.versions()) - self._bad_folders

    def _links(self) -> set[int]:
        return set(self.run.list_steps(self.run.deltas, STABLE)) - self._bad_links

    @staticmethod
    def _base_of(version: int, folders: set[int], links: set[int]) -> int | None:
        """Return the newest full version from which links lead to ``version``, possibly ``version`` itself."""
        while version not in folders:
            if version not in links:
                return None
            version -= 1
        return version


def prune_chains(run: RunDir, *, keep_last: int, keep: set[int]) -> None:
    """Delete versions except the newest ``keep_last``, those in ``keep``, and leased ones.

    The full version and the links from which a remaining version is reached are not deleted either.
    """
    run.delete_dropped(run.deltas)
    folders, links = run.stable_weights(), run.list_steps(run.deltas, STABLE)
    versions = sorted({*folders, *links})
    oldest = versions[-keep_last] if len(versions) >= keep_last else 0
    base = max((version for version in folders if version <= oldest), default=0)
    prune_weights(run, keep_last=sum(version >= base for version in folders), keep=keep)
    for version in links:
        # the link to the base itself is needed while an engine may still have the version before it
        if version <= min(base, oldest - 1) and not run.has_lease(run.delta_step(version)):
            run.delete_step(run.delta_step(version), STABLE)
