"""The files of a model folder as numbered chunks, and the local copy that they fill.

    table = list_chunks(folder)                       # the same on every node
    copy = LocalCopy(table, Path("/scratch/…"))
    copy.write(3, read_chunk(folder, table.chunks[3]))
    copy.finish()                                     # raises DataError if a file has another checksum than the hub's

The names of files come from the folder itself; a copy has no subfolders.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import sha256_of

CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Chunk:
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class ChunkTable:
    """Chunks of all files, ordered by name and offset."""

    sizes: dict[str, int]
    """File → bytes."""
    checksums: dict[str, str]
    """File → SHA-256, for files whose checksum is known from the hub cache."""
    chunks: tuple[Chunk, ...]

    @property
    def digest(self) -> str:
        """Return a name for this content: tables of different files or sizes have different ones."""
        rows = (f"{name} {size} {self.checksums.get(name, '')}" for name, size in self.sizes.items())
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]

    def share(self, index: int, num_nodes: int) -> list[int]:
        """Return the chunks that node ``index`` of ``num_nodes`` reads from the shared filesystem."""
        return list(range(index, len(self.chunks), num_nodes))


def list_chunks(folder: Path, chunk_bytes: int = CHUNK_BYTES) -> ChunkTable:
    """Return the chunks of a model folder's files, without its subfolders. Raises OSError."""
    sizes, checksums, chunks = {}, {}, []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or not path.is_file():
            continue
        sizes[path.name] = size = path.stat().st_size
        blob = path.resolve().name  # the hub cache names a large file by its SHA-256
        if path.is_symlink() and re.fullmatch(r"[0-9a-f]{64}", blob):
            checksums[path.name] = blob
        chunks += [
            Chunk(path.name, offset, min(chunk_bytes, size - offset))
            for offset in range(0, size, chunk_bytes)
        ]
    return ChunkTable(sizes, checksums, tuple(chunks))


def read_chunk(folder: Path, chunk: Chunk) -> bytes:
    """Read a chunk. Raises DataError if the file has become shorter."""
    with open(folder / chunk.file, "rb", buffering=0) as file:
        file.seek(chunk.offset)
        data = bytearray()
        while len(data) < chunk.length and (part := file.read(chunk.length - len(data))):
            data += part
    if len(data) < chunk.length:
        raise DataError("the file was truncated while it was read", location=str(folder / chunk.file))
    return bytes(data)


@dataclass
class LocalCopy:
    """A folder that is filled chunk by chunk, from several threads."""

    table: ChunkTable
    folder: Path
    done: set[int] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)
    """Notified when a chunk was written."""

    def create(self) -> None:
        """Create the files with their final size. Raises OSError if there is no space."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, size in self.table.sizes.items():
            fd = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                if size:
                    os.posix_fallocate(fd, 0, size)
            finally:
                os.close(fd)

    def write(self, index: int, data: bytes) -> None:
        """Write a chunk. Raises DataError for another length than the table's."""
        chunk = self.table.chunks[index]
        if len(data) != chunk.length:
            raise DataError(f"chunk {index} of {chunk.file} has {len(data)} bytes, not {chunk.length}")
        fd = os.open(self.folder / chunk.file, os.O_WRONLY)
        try:
            view = memoryview(data)
            while view:
                view = view[os.pwrite(fd, view, chunk.offset + len(data) - len(view)) :]
        finally:
            os.close(fd)
        with self.changed:
            self.done.add(index)
            self.changed.notify_all()

    def read(self, index: int) -> bytes:
        """Return a chunk that was written."""
        try:
            return read_chunk(self.folder, self.table.chunks[index])
        except FileNotFoundError:  # the complete folder is being renamed
            time.sleep(0.1)
            return read_chunk(self.folder, self.table.chunks[index])

    def wait_for(self, index: int, timeout_s: float) -> bool:
        """Wait until a chunk was written; False if it was not within ``timeout_s``."""
        with self.changed:
            return self.changed.wait_for(lambda: index in self.done, timeout_s)

    def missing(self) -> list[int]:
        return [index for index in range(len(self.table.chunks)) if index not in self.done]

    def finish(self) -> None:
        """Compare complete files with the checksums of the hub. Raises DataError with the file that differs."""
        for name, checksum in self.table.checksums.items():
            found = sha256_of(self.folder / name)
            if found != checksum:
                raise DataError(
                    f"{name} has the checksum {found[:12]}…, not {checksum[:12]}…",
                    location=str(self.folder),
                    hint="the shared copy is damaged: run primerl-hpc prefetch again",
                )


def rotate(items: Sequence[int], start: int) -> list[int]:
    """Return the items in order, beginning at position ``start``: nodes ask their peers in different orders."""
    start = start % len(items) if items else 0
    return [*items[start:], *items[:start]]
