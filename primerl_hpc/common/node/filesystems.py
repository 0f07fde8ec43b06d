"""The type of the filesystem of a folder, and locks of files on it. Standard library only."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs")
LOCAL = (*IN_MEMORY, "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "xfs", "zfs")
"""Filesystems that only one node uses, so that a lock on it is seen by all users of a file."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of locks on filesystems without them."""


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


def lock_file(fd: int, operation: int = fcntl.LOCK_EX, *, between_nodes: bool = False) -> bool:
    """Lock an open file until it is closed; False on a filesystem without locks (Lustre without ``flock``, NFS without
    its lock service). ``between_nodes``: ``lockf``, which more network filesystems support. Raises OSError."""
    lock = fcntl.lockf if between_nodes else fcntl.flock
    try:
        lock(fd, operation)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True
