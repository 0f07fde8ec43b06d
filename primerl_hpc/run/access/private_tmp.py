"""The run's private temporary folder on each node, which other users cannot create first.

Compilers and libraries keep caches under well-known names in /tmp (``/tmp/torchinductor_<user>``, ``/tmp/miopen``), and
some unpickle what they find: another user who creates such a folder first runs code in the job. The name of our folder
is derived from the attempt's API key (`runtime/step.py`) and the job's id, so it cannot be guessed before it exists;
its mode is 0700, and a folder of another user with this name is not used. It is in the profile's ``scratch`` folder, or
in the node's temporary folder without one. It is the TMPDIR of every process, holds the compile caches and copies of
base models, and is deleted when the last guard of the run on the node exits. If all of them are killed, the next run of
the user on the node deletes it. Standard library only.
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

from primerl_hpc.common.locks import LOCAL, filesystem_of, lock_file

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
_NO_LINK = os.O_CLOEXEC | os.O_NOFOLLOW
_DIRECTORY = os.O_DIRECTORY | _NO_LINK


class PrivateTmp:
    def __init__(self, folder: Path, fd: int, lock: int) -> None:
        self.folder = folder
        self._fd = fd
        """The open folder. Whether it is private was checked on this descriptor, because a path may change."""
        self._lock = lock
        """The file that this process has locked; -1 on a filesystem without locks."""

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
        created = cls._enter(base / (f"{name}-{job}" if job else name))
        environ["TMPDIR"] = str(created.folder)
        for variable, folder in (
            CACHES | (SCRATCH_CACHES if scratch or STORE_VARIABLE in environ else {})
        ).items():
            environ.setdefault(variable, str(created.folder / folder))
        return created

    @classmethod
    def _enter(cls, folder: Path) -> PrivateTmp:
        """Create ``folder`` and take the lock shared with other guards of this node; a folder with another name if this
        one is not exclusively ours.

        It is checked again whenever the last guard deleted it meanwhile: the name was visible until then, so another
        user may have created it.
        """
        while True:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            try:
                fd = os.open(folder, _DIRECTORY)
            except FileNotFoundError:
                continue
            except OSError:  # a link, a file, or a folder that this user cannot read
                fd = -1
            if fd >= 0 and _is_private(os.fstat(fd)):
                if (lock := _lock(fd)) is not None:
                    return cls(folder, fd, lock)
            else:
                folder = Path(tempfile.mkdtemp(prefix=".p", dir=folder.parent))
            if fd >= 0:
                os.close(fd)

    def release(self) -> None:
        """Delete the folder if no other process of the run holds it; keep it where the filesystem has no locks."""
        if self._lock < 0:
            return
        with contextlib.suppress(OSError):
            if lock_file(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
                _delete(self.folder, self._fd)


def _lock(folder: int) -> int | None:
    """Return the lock of an open folder, shared with other guards; -1 on a filesystem without locks, and None if
    another guard deleted it."""
    try:
        fd = os.open(LOCK, os.O_CREAT | os.O_RDWR | _NO_LINK, 0o600, dir_fd=folder)
    except FileNotFoundError:
        return None
    has_locks = lock_file(fd, fcntl.LOCK_SH)
    if has_locks and _is_same(fd, LOCK, dir_fd=folder):
        return fd
    os.close(fd)
    return None if has_locks else -1


def delete_abandoned(base: Path) -> list[Path]:
    """Delete the folders of this user in ``base`` whose guards were all killed, and return them.

    A folder that a guard holds is kept. Nothing is deleted on a network filesystem, whose locks other nodes may not
    see, and where others can rename folders: they could give such a name to another folder of this user.
    """
    from primerl_hpc.run.access.ownership import others_may_rename  # guards start in milliseconds

    if filesystem_of(base) not in LOCAL:
        return []
    try:
        if others_may_rename(base):
            return []
        names = [name for name in os.listdir(base) if _NAME.fullmatch(name)]
    except OSError:
        return []
    return [folder for name in names if _delete_if_abandoned(folder := base / name)]


def _delete_if_abandoned(folder: Path) -> bool:
    with contextlib.suppress(OSError), _opened(folder, _DIRECTORY) as fd:
        if not _is_private(os.fstat(fd)):
            return False
        with _opened(LOCK, os.O_RDWR, dir_fd=fd) as lock:
            if not lock_file(lock, fcntl.LOCK_EX | fcntl.LOCK_NB) or not _is_same(lock, LOCK, dir_fd=fd):
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
    fd = os.open(path, flags | _NO_LINK, dir_fd=dir_fd)
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

    TMPDIR is that of the submitting shell if the site sets none. If it is not writable on this node, as that of a job
    that has ended, the system's temporary folder is used. Raises OSError if the scratch folder contains a variable that
    is not set on this node.
    """
    if scratch := environ.get(SCRATCH_VARIABLE):
        return expand(scratch, environ)
    folder = environ.get("TMPDIR")
    return Path(folder if folder and os.access(folder, os.W_OK | os.X_OK) else tempfile.gettempdir())


def expand(folder: str, environ: Mapping[str, str]) -> Path:
    """Return ``folder`` with its variables and ``~`` replaced. Raises OSError for a variable that is not set."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in environ:
            raise FileNotFoundError(errno.ENOENT, f"${name} is not set on this node", folder)
        return environ[name]

    return Path(re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, folder)).expanduser()


def _is_private(found: os.stat_result) -> bool:
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and not stat.S_IMODE(found.st_mode) & 0o077
