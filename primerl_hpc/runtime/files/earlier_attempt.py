"""Control files of the previous attempt, which a new attempt deletes before it starts a process."""

from __future__ import annotations

import contextlib
import shutil

from primerl_hpc.common.files import names_in, read_bytes, read_json_or_none, write_bytes
from primerl_hpc.run.access.keys import renew_keys
from primerl_hpc.run.access.ownership import make_private
from primerl_hpc.run.rundir import CANCEL, RunDir


def clear_earlier_attempt(run: RunDir, attempt: int) -> None:
    """Delete control files of the previous attempt and create the log folder of this one.

    Raises OSError, and can be repeated after one.
    """
    for folder in (run.control, run.launch):
        make_private(folder)
    logs = run.attempt_logs(attempt)
    keep_plan_of_attempt(run, attempt)
    with contextlib.suppress(FileNotFoundError):
        run.latest_logs.unlink()
    run.latest_logs.symlink_to(logs.name)
    present = set(names_in(run.control))  # one listing instead of an operation for each file that is missing
    if run.stop_request.name in present:
        request = read_json_or_none(run.stop_request) or {}
        if request.get("reason") == CANCEL:  # it has not been served yet
            present.remove(run.stop_request.name)
    files = (run.failure, run.stop_request, run.checkpoint_request, run.full_weights_request)
    for file in (*files, run.live_version, run.rollout_progress):
        if file.name in present:
            file.unlink(missing_ok=True)
    folders = ("endpoints", "errors", "outcomes", "restart_requests", "broadcast", run.slurm_questions.name)
    for folder_name in present.intersection(folders):
        shutil.rmtree(run.control / folder_name, ignore_errors=True)
    renew_keys(run, attempt)


def keep_plan_of_attempt(run: RunDir, attempt: int) -> None:
    """Copy plan.json to the logs of the attempt that runs it."""
    kept = run.attempt_plan(attempt)
    write_bytes(kept, read_bytes(run.plan), is_durable=False)
