"""Step directories: completeness markers, queries, deletion. A step directory is ``<kind>/step_N``.

    list_steps(run.weights, STABLE)             # [1, 2, 3]: steps whose marker exists
    delete_step(run.weights_step(1), STABLE)    # marker first, so that no reader takes a partly deleted step
    delete_after([(run.weights, STABLE)], 3)    # before a recovery or resume from checkpoint 3

`RunDir` provides these rules for its own folders as methods.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from primerl_hpc.common.files import is_there, write_text
from primerl_hpc.run.leases import is_leased

STABLE = "STABLE"  # marker of a complete rollouts/step_N, weights/step_N or deltas/step_N
DROPPED = "DROPPED"  # marker that replaces STABLE: no new readers, but an existing one still holds a lease
COMPLETE = "COMPLETE"  # marker of a checkpoint with all of its sides
SIDE_DONE = "DONE"  # marker in a complete side of a checkpoint
_STEP = re.compile(r"step_(\d+)")


def all_steps(folder: Path) -> list[int]:
    """Return the steps under ``folder``, complete or not, in ascending order."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))


def list_steps(folder: Path, marker: str) -> list[int]:
    """Return the steps under ``folder`` whose marker exists, in ascending order."""
    return [step for step in all_steps(folder) if is_there(folder / f"step_{step}" / marker)]


def finish_checkpoint_side(checkpoint: Path, side: str, sides: tuple[str, ...]) -> bool:
    """Mark ``side``, whose files are already fsynced, as complete. The last one of ``sides`` writes COMPLETE.

    Returns True if the checkpoint is complete now.
    """
    write_text(checkpoint / side / SIDE_DONE, "")
    if all(is_there(checkpoint / name / SIDE_DONE) for name in sides):
        write_text(checkpoint / COMPLETE, "")
        return True
    return False


def delete_step(path: Path, marker: str) -> None:
    """Remove a step directory, marker first, so that no reader takes a partly deleted one for complete.

    Of a symbolic link only the link is removed.
    """
    if path.is_symlink():
        path.unlink(missing_ok=True)
        return
    (path / marker).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def delete_after(folders: Iterable[tuple[Path, str]], step: int) -> None:
    """Delete the steps after ``step`` that an earlier attempt or incarnation wrote. ``folders``: (folder, marker).

    Also deletes earlier steps without a marker, whose deletion was interrupted. A leased step (engines outlive an
    in-place recovery) only loses its marker; see `delete_dropped`.
    """
    for folder, marker in folders:
        if not folder.is_dir():
            continue
        for entry in folder.iterdir():
            match = _STEP.fullmatch(entry.name)
            is_kept = match and int(match[1]) <= step and is_there(entry / marker)
            if is_kept or not (match or entry.name.endswith(".tmp")):
                continue
            if is_leased(entry):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(entry / marker, entry / DROPPED)
            else:
                delete_step(entry, marker)


def delete_dropped(folder: Path) -> None:
    """Remove steps that `delete_after`, or a writer of the same step, left in ``folder`` and that have no reader
    now."""
    for step in list_steps(folder, DROPPED):
        path = folder / f"step_{step}"
        if not is_leased(path):
            delete_step(path, DROPPED)
    for path in folder.glob("step_*.*.tmp"):
        if not is_leased(path.with_name(path.name.split(".")[0])):
            shutil.rmtree(path, ignore_errors=True)
