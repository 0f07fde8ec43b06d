"""Weights as chains: every version as what changed since the one before, some of them whole as well.

``deltas/step_N/`` holds a file per changed shard of version N (`delta_codec`), and ``manifest.json``: the delta files' sizes
and CRC-32, and of every shard of N what the whole version's manifest would say of it. Applied to the shards of N - 1 it makes
those of N, byte for byte, and whoever applies it can tell.

    link = LinkWriter(run, version=3)
    link.begin()                                                            # leader, then a barrier
    entry = link.write("model-00001-of-00005.safetensors", encode(old, new, word_bytes=2))
    link.commit(entries, result)                                            # leader, after a barrier

Versions at ``weights.full_interval``, of checkpoints, the first of a trainer's life and the last are whole: a chain is
bounded, and export, evaluation and resume read model folders only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from isal import isal_zlib

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import is_there, read_json, write_text
from primerl_hpc.common.leases import renew_lease
from primerl_hpc.common.rundir import STABLE, RunDir
from primerl_hpc.transport.weights import Chain, Source
from primerl_hpc.transport.weights_filesystem import (
    MANIFEST,
    FilesystemWeightReader,
    FolderWriter,
    prune_weights,
)

LINK_VERSION = 1
SUFFIX = ".delta"


class LinkWriter(FolderWriter):
    def __init__(self, run: RunDir, version: int) -> None:
        super().__init__(run, version, run.delta_step(version))

    def write(self, shard: str, delta: bytes) -> dict[str, Any]:
        """Write what changed in ``shard``, durably; its manifest entry."""
        path = self.temporary / f"{shard}{SUFFIX}"
        with path.open("wb") as file:
            file.write(delta)
            file.flush()
            os.fsync(file.fileno())
        return {"name": path.name, "size_bytes": len(delta), "crc32": isal_zlib.crc32(delta)}

    def commit(self, entries: list[dict[str, Any]], result: list[dict[str, Any]]) -> Path:
        """``entries``: of the delta files; ``result``: of all shards as they are then."""
        return self.finish(
            {
                "manifest_version": LINK_VERSION,
                "policy_version": self.version,
                "files": sorted(entries, key=lambda entry: entry["name"]),
                "result": sorted(result, key=lambda entry: entry["name"]),
            }
        )


def read_link(folder: Path) -> tuple[dict[str, bytes], dict[str, dict[str, Any]]]:
    """Deltas by shard, and the manifest entries of all shards that they lead to.

    Raises DataError naming the file that is missing or not what the link's manifest says.
    """
    try:
        manifest = read_json(folder / MANIFEST)
        deltas = {}
        for entry in manifest["files"]:
            data = (folder / entry["name"]).read_bytes()
            if len(data) != entry["size_bytes"] or isal_zlib.crc32(data) != entry["crc32"]:
                raise DataError(
                    "its size or CRC-32 is not what its manifest says", place=str(folder / entry["name"])
                )
            deltas[entry["name"].removesuffix(SUFFIX)] = data
        return deltas, {entry["name"]: entry for entry in manifest["result"]}
    except (OSError, KeyError, TypeError) as error:
        raise DataError(f"not a whole link ({type(error).__name__}: {error})", place=str(folder)) from error


class DeltaWeightReader(FilesystemWeightReader):
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

    def open(self, version: int, reader: str) -> Chain:
        """The links back to the newest whole version, and those before it that are there: see `WeightReader.open`."""
        folders, links = self._folders(), self._links()
        base = self._base_of(version, folders, links)
        if base is None:
            raise DataError(
                f"policy version {version} has neither {STABLE} nor links to a version that has",
                place=str(self.run.weights_step(version)),
            )
        try:
            path = super().open(base, reader)
        except DataError:
            super().close(base, reader)
            raise
        first = version
        while first in links and first - 1 in folders | links:
            first -= 1
        chain = [each for each in range(first, version + 1) if each in links]
        leases = {self.run.lease(self.run.delta_step(each), reader) for each in chain}
        self._held[version, reader] = leases | {self.run.lease(path, reader)}
        for each in range(base + 1, version + 1):
            if not is_there(self.run.delta_step(each) / STABLE):
                self.close(version, reader)
                raise DataError("was deleted while it was opened", place=str(self.run.delta_step(each)))
        return Chain(str(path), base, tuple((each, str(self.run.delta_step(each))) for each in chain))

    def close(self, version: int, reader: str) -> None:
        """Leases that another open version needs too stay."""
        for lease in self._held.pop((version, reader), set()).difference(*self._held.values()):
            lease.unlink(missing_ok=True)

    def renew(self, version: int, reader: str) -> None:
        for lease in self._held.get((version, reader), ()):
            renew_lease(lease)

    def ask_for_whole(self) -> bool:
        write_text(self.run.full_weights_request, "")
        return True

    def give_up(self, version: int, source: Source) -> None:
        """A whole version of the same number that is written later counts again."""
        if version in self._folders():
            self._bad_folders.add(version)
        self._bad_links.add(version)

    def _folders(self) -> set[int]:
        return set(self.versions()) - self._bad_folders

    def _links(self) -> set[int]:
        return set(self.run.list_steps(self.run.deltas, STABLE)) - self._bad_links

    @staticmethod
    def _base_of(version: int, folders: set[int], links: set[int]) -> int | None:
        """The newest whole version that ``version`` is, or is linked to."""
        while version not in folders:
            if version not in links:
                return None
            version -= 1
        return version


def prune_chains(run: RunDir, *, keep_last: int, keep: set[int]) -> None:
    """Delete versions beyond the newest ``keep_last`` that nobody needs: neither ``keep``, nor leased, nor the whole
    version and the links that lead to one that stays."""
    run.delete_dropped(run.deltas)
    folders, links = run.stable_weights(), run.list_steps(run.deltas, STABLE)
    versions = sorted({*folders, *links})
    oldest = versions[-keep_last] if len(versions) >= keep_last else 0
    base = max((version for version in folders if version <= oldest), default=0)
    prune_weights(run, keep_last=sum(version >= base for version in folders), keep=keep)
    for version in links:
        # the link to the base itself stays while somebody may still be at the version before it
        if version <= min(base, oldest - 1) and not run.has_lease(run.delta_step(version)):
            run.delete_step(run.delta_step(version), STABLE)
