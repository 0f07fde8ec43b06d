"""Ownership checks of a run directory. Everything executed from it must belong to the executing user.

    make_private(run.control)            # mode 0700, regardless of the umask
    check_own(run)                       # before a plan or script of the run is executed
    check_may_change(run)                # before a command writes into the run

A plan contains interpreters and variables, and a batch script is a program: a directory that another user prepared or
can write could run code as the user that resumes the run (docs/security.md).
"""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from primerl_hpc.common.errors import OccupiedError
from primerl_hpc.run.access.elsewhere import check_parts
from primerl_hpc.run.rundir import RunDir

PRIVATE = 0o700
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def set_safe_umask() -> None:
    """Remove write permission of group and others from new files of this process; keep a stricter umask."""
    os.umask(os.umask(WRITABLE_BY_OTHERS) | WRITABLE_BY_OTHERS)


def make_private(folder: Path, mode: int = PRIVATE) -> None:
    """Create ``folder`` with ``mode``, or set the mode of an existing one. A setgid parent would add bits."""
    folder.mkdir(parents=True, exist_ok=True, mode=mode)
    if stat.S_IMODE(folder.stat().st_mode) != mode:
        folder.chmod(mode)


def executed_paths(run: RunDir) -> list[Path]:
    """Return the paths that an attempt executes, trusts or keeps secret, and the folders that contain them."""
    names = ("job.sbatch", "engines.sbatch", "export.sbatch")
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
    """Raise OccupiedError if another user owns or can write a path that this run executes."""
    for path in executed_paths(run):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(found.st_mode):
            raise OccupiedError(
                "is a symbolic link, but must be a file or folder of the run",
                location=str(path),
                hint="submit the recipe again",
            )
        if found.st_uid not in (os.geteuid(), 0):
            raise OccupiedError(
                f"belongs to {user_name(found.st_uid)}, and its plan would run code as {user_name(os.geteuid())}",
                location=str(path),
                hint="submit the recipe yourself; checkpoint.fork continues from a checkpoint of this run",
            )
        if found.st_mode & WRITABLE_BY_OTHERS:
            raise OccupiedError(
                f"is writable by other users (mode {stat.S_IMODE(found.st_mode):o}), so its plan could run their code",
                location=str(path),
                hint=f"check that it was not modified, then: chmod go-w {path}",
            )

    check_parts(run)


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


def writable_by_others(folder: Path) -> Path | None:
    """Return the nearest existing folder at or above ``folder`` if another user can replace its contents."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    mode = existing.stat().st_mode
    is_open = mode & WRITABLE_BY_OTHERS and not mode & stat.S_ISVTX
    return existing if is_open else None


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
