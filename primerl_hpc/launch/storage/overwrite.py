"""Replace a run directory: delete an earlier run of the same user, and nothing else.

earlier = find_earlier(root)          # None: nothing is there; raises OccupiedError for what must not be deleted
delete_run(earlier)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from primerl_hpc.common.errors import OccupiedError, PrimerlError
from primerl_hpc.launch.storage.usage import Amount, check_is_mine, measure_run
from primerl_hpc.launch.submit import check_not_running, clear_run_dir
from primerl_hpc.plan.plan import load_plan
from primerl_hpc.run.rundir import RunDir


@dataclass(frozen=True)
class EarlierRun:
    run: RunDir
    amount: Amount


def find_earlier(root: Path) -> EarlierRun | None:
    """Return the run at ``root`` that a new one may replace; None if there is nothing.

    Raises OccupiedError if ``root`` is not a directory with our plan.json, belongs to another user, or has a job that
    is running or queued; UnansweredError if SLURM does not answer.
    """
    if not os.path.lexists(root) or (root.is_dir() and not root.is_symlink() and not any(root.iterdir())):
        return None
    run = RunDir(root)
    if root.is_symlink() or not root.is_dir() or not run.plan.is_file():
        raise _refusal(
            root, "is not a run directory (it has no plan.json), and --overwrite deletes only run directories"
        )
    check_is_mine(run)
    try:
        load_plan(run)
    except PrimerlError as error:
        cause = f"its plan.json is not that of a run of this version ({error.cause})"
        raise _refusal(root, f"{cause}, and --overwrite deletes only those") from error
    check_not_running(run)
    return EarlierRun(run, measure_run(run).total)


def _refusal(root: Path, cause: str) -> OccupiedError:
    return OccupiedError(cause, location=str(root), hint="choose another --run-dir, or delete it yourself")


def delete_run(earlier: EarlierRun) -> None:
    """Delete the content of the run directory; the directory stays, because it may have ACLs or striping.

    Raises OccupiedError if the run was started meanwhile.
    """
    check_not_running(earlier.run)
    # the plan first: after an interruption, no command treats the remaining files as a run
    earlier.run.plan.unlink(missing_ok=True)
    clear_run_dir(earlier.run.root, keep_root=True)
