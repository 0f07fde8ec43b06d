"""Ownership checks of a run directory. Everything executed from it must belong to the executing user.

    make_private(run.control)            # mode 0700, regardless of the umask
    check_own(run)                       # before a plan or script of the run is executed
    read_own(run.endpoint("router-0"), run)   # content of a file that decides where a secret is sent
    check_may_change(run)                # before a command writes into the run

A plan contains interpreters and variables, and a batch script is a program: a directory that another user prepared or
can write could run code as the user that resumes the run (docs/security.md).
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import shlex
import stat
from pathlib import Path

from primerl_hpc.common.errors import OccupiedError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.run.access.elsewhere import check_parts
from primerl_hpc.run.rundir import RunDir

PRIVATE = 0o700
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
MAX_OWN_BYTES = 1 << 20
"""Limit of `read_own`. Endpoints, keys and certificates are smaller."""
_NO_LINK = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_LINK = "is a symbolic link, but must be a file or folder of the run"
_OWNER = "only the user who submitted a run can send requests to its engines"


def set_safe_umask() -> None:
    """Remove write permission of group and others from new files of this process; keep a stricter umask."""
    os.umask(os.umask(WRITABLE_BY_OTHERS) | WRITABLE_BY_OTHERS)


def make_private(folder: Path, mode: int = PRIVATE) -> None:
    """Create ``folder`` with ``mode``, or set the mode of an existing one. A setgid parent would add bits."""
    folder.mkdir(parents=True, exist_ok=True, mode=mode)
    if stat.S_IMODE(folder.stat().st_mode) != mode:
        folder.chmod(mode)


def executed_paths(run: RunDir) -> list[Path]:
    """Return the paths that an attempt executes, trusts or keeps secret, with their folders in the run directory."""
    names = "job.sbatch engines.sbatch export.sbatch setup.sh export-setup.sh unpack-bundle.sh all.sh".split()
    scripts = [run.launch / name for name in names]
    return [
        run.root,
        run.launch,
        run.control,
        run.control / "keys",
        run.code,
        run.plan,
        run.recipe,
        run.profile,
        *scripts,
    ]


def check_own(run: RunDir) -> None:
    """Raise OccupiedError if another user owns or can write a path that this run executes, or can rename a folder above
    it, unless the run was submitted with ``--allow-shared-parent``."""
    for path in executed_paths(run):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        _check_status(
            path,
            found,
            danger=f"its plan would run code as {user_name(os.geteuid())}",
            hint="submit the recipe yourself; checkpoint.fork continues from a checkpoint of this run",
        )
    check_parts(run)
    if writable_by_others(run.root.parent) is not None:
        is_allowed = (read_json_or_none(run.plan) or {}).get("allow_shared_parent", False)
        check_parents(run.root, is_allowed=is_allowed)


def _check_status(path: Path, found: os.stat_result, *, danger: str, hint: str) -> None:
    """Raise OccupiedError for a link, and for a file or folder that another user owns or can write."""
    if stat.S_ISLNK(found.st_mode):
        raise OccupiedError(_LINK, location=str(path), hint="submit the recipe again")
    if found.st_uid not in (os.geteuid(), 0):
        raise OccupiedError(
            f"belongs to {user_name(found.st_uid)}, and {danger}",
            location=str(path),
            hint=hint,
        )
    if found.st_mode & WRITABLE_BY_OTHERS:
        raise OccupiedError(
            f"is writable by other users (mode {stat.S_IMODE(found.st_mode):o}), and {danger}",
            location=str(path),
            hint=f"check that it was not modified, then: chmod go-w {path}",
        )


def read_own(path: Path, run: RunDir) -> bytes:
    """Return the content of a file of the run. It and all folders up to the run directory must belong to this user, and
    others must not be able to write them; none may be a link.

    Each is opened in the folder that was just checked, so a folder that is replaced meanwhile is not entered. Raises
    OccupiedError, and OSError for a file that is missing or cannot be read.
    """
    place = Path(os.path.realpath(run.root))
    with contextlib.ExitStack() as opened:
        fd = None
        for name in (str(place), *path.relative_to(run.root).parts):
            place /= name
            try:
                fd = os.open(name, _NO_LINK, dir_fd=fd)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                raise OccupiedError(_LINK, location=str(place), hint=_OWNER) from error
            opened.callback(os.close, fd)
            _check_status(place, os.fstat(fd), danger="it could send secrets elsewhere", hint=_OWNER)
        assert fd is not None
        with open(fd, "rb", closefd=False) as file:
            return file.read(MAX_OWN_BYTES)


def check_may_change(run: RunDir, *, hint: str) -> None:
    """Raise OccupiedError if the run belongs to another user and this user cannot write it."""
    if not os.access(run.root, os.W_OK | os.X_OK) or not os.access(run.control, os.W_OK | os.X_OK):
        _refuse_foreign(run, hint)


def check_may_enter(run: RunDir) -> None:
    """Raise OccupiedError if the run belongs to another user and this user cannot read it."""
    if not os.access(run.root, os.R_OK | os.X_OK):
        _refuse_foreign(run, "only its owner can read it")


def check_may_read(run: RunDir) -> None:
    """Raise OccupiedError if the run belongs to another user and this user cannot read its state."""
    if run.control.is_dir() and not os.access(run.control, os.R_OK | os.X_OK):
        _refuse_foreign(run, "only its owner can read its state")


def _refuse_foreign(run: RunDir, hint: str) -> None:
    uid = run.root.stat().st_uid
    if uid != os.geteuid():
        raise OccupiedError(f"this run belongs to {user_name(uid)}", location=str(run.root), hint=hint)


def check_parents(root: Path, *, is_allowed: bool = False) -> None:
    """Raise OccupiedError if other users can write to a folder above ``root``, unless ``is_allowed``.

    They could rename the run directory and put another one in its place: code of the run would be theirs.
    """
    if is_allowed or (folder := writable_by_others(root.parent)) is None:
        return
    raise OccupiedError(
        f"other users may write to {folder} (mode {stat.S_IMODE(folder.stat().st_mode):o}), so they can replace the "
        f"run directory, and their code would run as {user_name(os.geteuid())}",
        location=str(root),
        hint=f"run chmod g-w,o-w {shlex.quote(str(folder))}, or chmod +t {shlex.quote(str(folder))} (only owners may "
        "rename), or choose a folder of your own with --run-dir or runs_dir of the profile; to accept it, use "
        "--allow-shared-parent",
    )


def writable_by_others(folder: Path) -> Path | None:
    """Return the nearest folder at or above ``folder`` whose entries another user can rename; None if there is none.

    Owners of folders are trusted, and so are members of a group that has no members but this user or root.
    """
    place = Path(os.path.realpath(folder))
    return next((path for path in (place, *place.parents) if path.exists() and others_may_rename(path)), None)


def others_may_rename(folder: Path) -> bool:
    """True if another user can rename or replace the entries of ``folder``."""
    found = folder.stat()
    if found.st_mode & stat.S_ISVTX or not found.st_mode & WRITABLE_BY_OTHERS:
        return False
    return bool(found.st_mode & stat.S_IWOTH) or not _is_private_group(folder, found.st_gid)


def _is_private_group(folder: Path, gid: int) -> bool:
    """True for root's group, and for a group of this user alone, which has his name (a user private group)."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
        if "system.posix_acl_access" in os.listxattr(folder):
            return False  # the group's bits are the maximum of all entries, also of other users
    except KeyError:
        return False
    except OSError:  # a filesystem without attributes
        pass
    is_own = gid == 0 or (gid == user.pw_gid and group.gr_name == user.pw_name)
    return is_own and set(group.gr_mem) <= {user.pw_name, "root"}


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
