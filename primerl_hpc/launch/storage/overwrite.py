"""Replace a run directory: delete an earlier run of the same user, and nothing else.

replaced = find_replaced(submission)    # with its evaluation; raises OccupiedError for what must not be deleted
for earlier in replaced:
    delete_run(earlier)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import OccupiedError, PrimerlError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.launch.compose import Submission
from primerl_hpc.launch.storage.clear import clear_run_dir, content_of
from primerl_hpc.launch.storage.usage import Amount, check_is_mine, measure_run
from primerl_hpc.launch.submit import check_not_running
from primerl_hpc.plan.plan import load_plan
from primerl_hpc.run.access.elsewhere import homes_of
from primerl_hpc.run.rundir import RunDir


@dataclass(frozen=True)
class EarlierRun:
    run: RunDir
    amount: Amount


def find_replaced(submission: Submission) -> list[EarlierRun]:
    """Return the runs that a submission replaces: the one in its directory, and the evaluation that followed it.

    Raises OccupiedError as `find_earlier` does, for an evaluation of another run, and if the submission reads files of
    a run that it would replace.
    """
    run = RunDir(Path(submission.plan.run_dir))
    replaced = [find_earlier(run.root)]
    if submission.follow_up is not None and (earlier := find_earlier(run.evaluation.root)) is not None:
        if (read_json_or_none(earlier.run.job) or {}).get("parent") != str(run.root):
            raise _refusal(earlier.run.root, f"is not the evaluation of {run.root}, but has its name")
        replaced.append(earlier)
    found = [earlier for earlier in replaced if earlier is not None]
    for path in _inputs(submission):
        if any(_is_within(path, earlier.run) for earlier in found):
            raise OccupiedError(
                "--overwrite would delete it, but the new run reads it",
                location=path,
                hint="choose another --run-dir, or copy what the new run reads",
            )
    return found


def _inputs(submission: Submission) -> Iterator[str]:
    """Yield the absolute paths that the run reads: those in its recipe, of its bundle, and of code that is copied."""
    for phase in submission.plan.phases:
        yield from _paths_in(phase.recipe.model_dump(mode="json", exclude={"after"}))
    if submission.plan.bundle is not None:
        yield submission.plan.bundle.path
    if submission.files.code is not None:
        yield from map(str, submission.files.code.sources.module_files.values())


def _paths_in(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value.startswith("/") and "\0" not in value:
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _paths_in(part)


def _is_within(path: str, run: RunDir) -> bool:
    """True if ``path`` is in the run directory, or in a folder elsewhere that holds a part of the run."""
    resolved = Path(os.path.realpath(path))
    folders = (Path(os.path.realpath(run.root)), *homes_of(run))
    return Path(os.path.normpath(path)).is_relative_to(run.root) or any(map(resolved.is_relative_to, folders))


def find_earlier(root: Path) -> EarlierRun | None:
    """Return the run at ``root`` that a new one may replace; None if there is nothing.

    Raises OccupiedError if ``root`` is not a directory with our plan.json, belongs to another user, or has a job that
    is running or queued; UnansweredError if SLURM does not answer.
    """
    run = RunDir(root)
    if not os.path.lexists(root) or run.is_unfinished:
        return None  # `claim_run_dir` takes it, or refuses it
    if root.is_dir() and not root.is_symlink() and not content_of(run):
        return None
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
    clear_run_dir(earlier.run.root, keep_root=True)
