"""The type of the filesystem of a folder. Standard library only."""

from __future__ import annotations

from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs")
LOCAL = (*IN_MEMORY, "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "xfs", "zfs")
"""Filesystems that only one node uses, so that a lock on it is seen by all users of a file."""


def filesystem_of(path: Path, mounts: str = "/proc/self/mounts") -> str:
    """Return the type of the filesystem of ``path``; empty if unknown."""
    resolved = str(path.resolve())
    best, kind = "", ""
    try:
        lines = Path(mounts).read_text(errors="surrogateescape").split("\n")
    except OSError:
        return ""
    for line in filter(None, lines):
        _, folder, found, *_ = line.split(" ")
        folder = folder.replace("\\040", " ")
        if (resolved == folder or resolved.startswith(folder.rstrip("/") + "/")) and len(folder) >= len(best):
            best, kind = folder, found
    return kind
