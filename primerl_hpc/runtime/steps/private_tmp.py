"""The run's private temporary folder on each node, which other users can neither guess nor create first.

Compilers and libraries keep caches under well-known names in /tmp (``/tmp/torchinductor_<user>``, ``/tmp/miopen``), and
some unpickle what they find: another user who creates such a folder first runs code in the job. The name of our folder
is derived from the attempt's API key (`runtime/types.py`) and the job's id, so it cannot be guessed, and its mode is
0700. It is in the profile's ``scratch`` folder, or in the node's temporary folder without one. It is the TMPDIR of
every process, holds the compile caches and copies of base models, and is deleted when the last guard of the run on the
node exits. If all of them are killed, the next run of the user on the node deletes it. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from primerl_hpc.common.node.filesystems import LOCAL, filesystem_of

NAME_VARIABLE = "PRIMERL_PRIVATE_TMP"
SCRATCH_VARIABLE = "PRIMERL_SCRATCH"
STORE_VARIABLE = "PRIMERL_COMPILE_STORE"
CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "MIOPEN_USER_DB_PATH": "miopen",
    "MIOPEN_CUSTOM_CACHE_DIR": "miopen-cache",
}
"""Variables of libraries whose default cache folder has a well-known name → subfolder; a user's own values are kept."""
SCRATCH_CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "DG_JIT_CACHE_DIR": "deep-gemm",
    "CUDA_CACHE_PATH": "cuda",
}
"""Variables of libraries whose caches are in the home folder, and move where the profile names a scratch folder or
keeps compile caches."""

LOCK = ".lock"
"""File in the folder on which each guard that uses it holds a shared lock."""

_NAME = re.compile(r"\.p[0-9a-f]{12}(?:-\d+)?")
"""Names of the folders: `RunKeys.temporary_name`, and the job's id."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of flock on filesystems without locks."""


class PrivateTmp:
    def __init__(self, folder: Path) -> None:
        self.folder, self._lock = folder, -1

    @classmethod
    def create(cls, environ: MutableMapping[str, str]) -> PrivateTmp | None:
        """Create and lock the folder named in ``environ``, and set variables that point into it; None if none is named.

        Raises OSError if the node's temporary folder is not writable.
        """
        if not (name := environ.get(NAME_VARIABLE)):
            return None
        scratch = environ.get(SCRATCH_VARIABLE)
        base = base_folder(environ)
        if scratch:
            base.mkdir(parents=True, exist_ok=True)
        job = environ.get("SLURM_JOB_ID")
        created = cls(_make_private(base, f"{name}-{job}" if job else name))
        created._hold()
        environ["TMPDIR"] = str(created.folder)
        for variable, folder in (
            CACHES | (SCRATCH_CACHES if scratch or STORE_VARIABLE in environ else {})
        ).items():
            environ.setdefault(variable, str(created.folder / folder))
        return created

    def _hold(self) -> None:
        """Take the lock shared with other guards of this node; retry if the last one was just deleting the folder."""
        while True:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            try:
                fd = os.open(self.folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
            except OSError as error:  # other users of the folder are unknown: it is not deleted
                if error.errno not in NO_LOCKS:
                    raise
                os.close(fd)
                return
            if _is_same(fd, self.folder / LOCK):
                self._lock = fd
                return
            os.close(fd)

    def release(self) -> None:
        """Delete the folder if no other process of the run holds it; keep it where the filesystem has no locks."""
        if self._lock < 0:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with _opened(self.folder, os.O_DIRECTORY) as fd:
                _delete(self.folder, fd)


def delete_abandoned(base: Path) -> list[Path]:
    """Delete the folders of this user in ``base`` whose guards were all killed, and return them.

    A folder that a guard holds is kept. Nothing is deleted on a network filesystem, whose locks other nodes may not
    see.
    """
    if filesystem_of(base) not in LOCAL:
        return []
    try:
        names = [name for name in os.listdir(base) if _NAME.fullmatch(name)]
    except OSError:
        return []
    return [folder for name in names if _delete_if_abandoned(folder := base / name)]


def _delete_if_abandoned(folder: Path) -> bool:
    with contextlib.suppress(OSError), _opened(folder, os.O_DIRECTORY) as fd:
        if not _is_private(os.fstat(fd)):
            return False
        with _opened(LOCK, os.O_RDWR, dir_fd=fd) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_same(lock, LOCK, dir_fd=fd):
                return False
            _delete(folder, fd)
            return True
    return False


def _delete(folder: Path, fd: int) -> None:
    """Delete the folder, whose exclusive lock is held. The lock is the last file: no other guard enters before.

    ``fd``: the open folder. Its content is deleted through it, because others may replace ``folder`` by a link if
    they can write its parent.
    """
    for name in os.listdir(fd):
        if stat.S_ISDIR(os.lstat(name, dir_fd=fd).st_mode):
            shutil.rmtree(name, ignore_errors=True, dir_fd=fd)
        elif name != LOCK:
            os.unlink(name, dir_fd=fd)
    os.unlink(LOCK, dir_fd=fd)
    os.rmdir(folder)


@contextlib.contextmanager
def _opened(path: Path | str, flags: int, dir_fd: int | None = None) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def _is_same(fd: int, path: Path | str, dir_fd: int | None = None) -> bool:
    """Return False if the open file was deleted; another guard may have created it again."""
    try:
        return os.stat(path, dir_fd=dir_fd).st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False


def base_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of the node in which the run's folder is created: the profile's scratch, or TMPDIR.

    Raises OSError if the scratch folder contains a variable that is not set on this node.
    """
    if not (scratch := environ.get(SCRATCH_VARIABLE)):
        return Path(environ.get("TMPDIR") or tempfile.gettempdir())
    return expand(scratch, environ)


def expand(folder: str, environ: Mapping[str, str]) -> Path:
    """Return ``folder`` with its variables and ``~`` replaced. Raises OSError for a variable that is not set."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in environ:
            raise FileNotFoundError(errno.ENOENT, f"${name} is not set on this node", folder)
        return environ[name]

    return Path(re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, folder)).expanduser()


def _make_private(base: Path, name: str) -> Path:
    """Create ``base/name``; if that exists and is not exclusively ours, a new folder with another name."""
    folder = base / name
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not _is_private(folder.lstat()):
            return Path(tempfile.mkdtemp(prefix=".p", dir=base))
    return folder


def _is_private(found: os.stat_result) -> bool:
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and not stat.S_IMODE(found.st_mode) & 0o077
