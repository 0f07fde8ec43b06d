"""Locks of files, for filesystems with and without them, and types of filesystems. No other module calls flock, lockf.

    with (folder / "lock").open("w") as file:
        has_locks = lock_file(file.fileno())
    if take_exclusive(folder / "breaking", stale_s=90): …     # the file of a process that may be killed

Lustre without ``flock`` and NFS without its lock service refuse every lock. A caller then does without, or reports
`no_locks_error`. `run/lock.py` is the lock of a run directory. Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from primerl_hpc.common.errors import ConfigError

IN_MEMORY = ("tmpfs", "ramfs")
LOCAL = (*IN_MEMORY, "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "xfs", "zfs")
"""Filesystems that only one node uses, so that a lock on it is seen by all users of a file."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of locks on filesystems without them."""


def lock_file(fd: int, operation: int = fcntl.LOCK_EX, *, between_nodes: bool = False) -> bool:
    """Lock an open file until it is closed; False on a filesystem without locks.

    ``between_nodes``: ``lockf``, which more network filesystems support. Raises OSError, with ``LOCK_NB`` if another
    process has the lock.
    """
    lock = fcntl.lockf if between_nodes else fcntl.flock
    try:
        lock(fd, operation)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def no_locks_error(error: OSError, package: str, folders: Mapping[str, Path]) -> ConfigError | None:
    """Return the error for a library that locks files in ``folders`` (variable → folder); None for another reason."""
    for variable, folder in folders.items() if error.errno in NO_LOCKS else ():
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
            if not lock_file(file.fileno()):  # EINVAL has other reasons too
                return ConfigError(
                    f"{folder} is on a filesystem without file locks, which package {package} needs ({error.strerror})",
                    hint=f"set {variable}, or cache.path of the profile, to a folder on a filesystem with locks: "
                    "Lustre has them if it is mounted with flock, NFS with its lock service",
                )
    return None


def is_stale(path: Path, stale_s: float) -> bool:
    """True if the file was not touched for ``stale_s``, by the clock of this node, or does not exist."""
    try:
        return time.time() - path.stat().st_mtime >= stale_s
    except FileNotFoundError:
        return True


def take_exclusive(path: Path, stale_s: float) -> bool:
    """Create the file of a process that deletes it when it is done; False while another process has it.

    A file that is stale is replaced, because its process was killed. Imports `files`.
    """
    from primerl_hpc.common.files import create_exclusive  # guards start in milliseconds

    if create_exclusive(path, str(os.getpid())):
        return True
    if path.exists() and not (is_stale(path, stale_s) and _remove(path, stale_s)):
        return False
    return create_exclusive(path, str(os.getpid()))


def _remove(path: Path, stale_s: float) -> bool:
    """Remove a stale file; False if another process has replaced it meanwhile, whose file is kept.

    A file is renamed before it is checked again: only one process can do that.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.stale")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return True
    try:
        if is_stale(aside, stale_s):
            return True
        with contextlib.suppress(OSError):
            os.link(aside, path)
        return False
    finally:
        aside.unlink(missing_ok=True)


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
