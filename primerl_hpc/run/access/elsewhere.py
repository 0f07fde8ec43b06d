"""Parts of a run in another shared folder than the run directory (``storage.NAME.holds`` of the profile).

    link_part(run, "checkpoints", Path("/project/me"))    # run/checkpoints → /project/me/my-run-001-3f9c/checkpoints
    check_parts(run)                                   # before an attempt: a missing part would look like a new run
    delete_parts(run)                                  # with the run

The run directory has a symbolic link for each part, so that everything else finds it at its usual path. The folder
elsewhere contains the file ``RUN`` with the path of its run directory; without it, nothing is deleted.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from primerl_hpc.common.errors import OccupiedError
from primerl_hpc.common.files import write_text
from primerl_hpc.common.names import MAIN_PHASE, WARMUP_PHASE
from primerl_hpc.run.rundir import RunDir

PARTS = ("checkpoints", "weights")
MARKER = "RUN"
_PHASES = (MAIN_PHASE, WARMUP_PHASE)
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def part_path(run: RunDir, part: str) -> Path:
    """Return the usual path of a part."""
    return run.checkpoints if part == "checkpoints" else run.weights


def link_part(run: RunDir, part: str, folder: Path) -> None:
    """Create the part's folder below ``folder``, with the mode of the run directory, and the link to it.

    Raises OSError. ``run``: of one phase.
    """
    links = [link for link in links_of(run) if link.resolve().parent.parent == folder.resolve()]
    if links:
        home = links[0].resolve().parent
    else:
        home = folder.resolve() / f"{run.root.name}-{secrets.token_hex(4)}"
        home.mkdir(parents=True, mode=0o700)
        home.chmod(stat.S_IMODE(run.root.stat().st_mode))
        write_text(home / MARKER, f"{os.path.realpath(run.root)}\n")
    name = part if run.phase_name == MAIN_PHASE else f"{run.phase_name}-{part}"
    (home / name).mkdir()
    link = part_path(run, part)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(home / name)


def links_of(run: RunDir) -> list[Path]:
    """Return the links in the place of parts, of all phases."""
    paths = [part_path(run.phase(phase), part) for phase in _PHASES for part in PARTS]
    return [path for path in paths if path.is_symlink()]


def homes_of(run: RunDir) -> list[Path]:
    """Return the existing folders elsewhere that belong to this run."""
    homes = dict.fromkeys(Path(os.path.realpath(link)).parent for link in links_of(run))
    return [home for home in homes if _owner_of(home) == os.path.realpath(run.root)]


def _owner_of(home: Path) -> str | None:
    try:
        return (home / MARKER).read_text().removesuffix("\n")
    except OSError:
        return None


def check_parts(run: RunDir) -> None:
    """Raise OccupiedError if a part elsewhere is missing, or another user owns it or can write it."""
    for link in links_of(run):
        try:
            found = link.stat()
        except FileNotFoundError:
            raise OccupiedError(
                f"{os.readlink(link)}, which holds this part of the run, does not exist",
                location=str(link),
                hint="the site may have deleted it, or this machine does not mount it; to continue without it, replace "
                "the link by a folder",
            ) from None
        home = Path(os.path.realpath(link)).parent.stat()
        if {found.st_uid, home.st_uid} - {os.geteuid(), 0} or (
            found.st_mode | home.st_mode
        ) & _WRITABLE_BY_OTHERS:
            raise OccupiedError(
                "its folder belongs to another user, or can be written by one",
                location=os.path.realpath(link),
                hint=f"check that it was not modified, then: chmod go-w {os.path.realpath(link)}",
            )


def superseded_elsewhere(link: Path, name: str) -> Path:
    """Return the folder on the filesystem of a part for what ``resume --step`` moves away."""
    return Path(os.path.realpath(link)).parent / "superseded" / name


def files_of_run(run: RunDir) -> Iterator[Path]:
    """Yield all files and symbolic links of the run in a fixed order, those of parts elsewhere at their usual paths."""
    homes = homes_of(run)
    for path in files_below(run.root):
        is_part = path.is_symlink() and any(
            Path(os.path.realpath(path)).is_relative_to(home) for home in homes
        )
        if is_part and path.is_dir():
            yield from files_below(path)
        else:
            yield path


def files_below(folder: Path) -> Iterator[Path]:
    """Yield all files and symbolic links below ``folder``, in a fixed order."""
    for root, folders, names in os.walk(folder):
        folders.sort()
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        for name in sorted([*names, *links]):
            yield Path(root, name)


def delete_parts(run: RunDir) -> None:
    """Delete the folders elsewhere that belong to this run, their marker last."""
    for home in homes_of(run):
        for entry in home.iterdir():
            if entry.name != MARKER:
                shutil.rmtree(entry, ignore_errors=True)
        with contextlib.suppress(OSError):
            (home / MARKER).unlink()
            home.rmdir()
