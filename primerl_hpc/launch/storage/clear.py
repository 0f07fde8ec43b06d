"""Delete the content of a run directory so that the next submission to it works, also after a kill at any step.

clear_run_dir(root, keep_root=True)     # `RunDir.submission_lock` exists from the first deletion to the last one
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.run.access.elsewhere import delete_parts
from primerl_hpc.run.lock import SupervisorLock
from primerl_hpc.run.rundir import RunDir


def content_of(run: RunDir) -> set[str]:
    """Return the names in the run directory, without temporary ones of its lock."""
    return {name for name in os.listdir(run.root) if not name.startswith(f".{run.submission_lock.name}.")}


def clear_run_dir(root: Path, *, keep_root: bool) -> None:
    """Delete the content of a run directory, also in other folders. If it is killed, `claim_run_dir` takes the rest.

    ``keep_root``: the user created it, maybe with striping or ACLs. Raises OccupiedError if another process submits or
    deletes a run there.
    """
    run = RunDir(root)
    lock = SupervisorLock(run.submission_lock)
    with contextlib.suppress(OSError):  # a full disk
        if read_json_or_none(lock.path) != lock.identity:
            lock.acquire()
    delete_content(run)
    lock.release()
    if not keep_root:
        shutil.rmtree(root, ignore_errors=True)


def delete_content(run: RunDir) -> None:
    """Delete all but the lock. Without the plan, no command treats the rest as a run."""
    run.plan.unlink(missing_ok=True)
    delete_parts(run)
    for entry in [*run.root.iterdir()]:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry != run.submission_lock:
            entry.unlink(missing_ok=True)
