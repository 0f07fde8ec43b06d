"""Stop a run through its supervisor, which saves first, or cancel a job that has not started."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from typing import Any

from primerl_hpc.common.errors import OccupiedError, SchedulerError
from primerl_hpc.common.files import read_json_or_none, write_json
from primerl_hpc.common.names import RunState
from primerl_hpc.common.waiting import wait_until
from primerl_hpc.launch.queue import drop_jobs
from primerl_hpc.launch.submit import drop_interrupted
from primerl_hpc.observe.status.job_watcher import JobWatcher
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.run.access.ownership import check_may_change, check_own, read_own
from primerl_hpc.run.job_chain import chain_of
from primerl_hpc.run.lock import is_local_job_alive
from primerl_hpc.run.rundir import CANCEL, RunDir

WAIT_S = 900.0


def cancel_run(run: RunDir, *, now: bool, wait: bool) -> RunState:
    """Request the end of a run; return its state afterwards. A run that has ended keeps its state.

    Raises OccupiedError for another user's run, and for a waiting one whose job another user may have named,
    SchedulerError if the scheduler does not cancel a waiting job, TimeoutWaitingError if ``wait`` takes too long.
    """
    check_may_change(run, hint="only its owner can cancel it")
    jobs = JobWatcher()
    poll = lambda: take_snapshot(run, jobs.facts_of([run]))  # noqa: E731
    snapshot = poll()
    state = snapshot.state
    if state == RunState.UNKNOWN:
        check_own(run)
        drop_interrupted(run, snapshot.job)
    if state.is_final or state == RunState.UNKNOWN:
        return state
    if (
        state in (RunState.SUBMITTED, RunState.PENDING) and "here" not in snapshot.job
    ):  # that job is the user's
        _check_own_job(run)
        _drop_links(run, after=snapshot.job)
        _drop_job(snapshot.job)
        earlier, job = read_json_or_none(run.state) or {}, read_json_or_none(run.job) or {}
        attempt = max(earlier.get("attempt", 0), job.get("attempt", 0))
        write_json(run.state, {**earlier, "state": RunState.CANCELLED.value, "attempt": attempt})
    else:
        write_json(run.stop_request, {"reason": CANCEL, "now": now})  # works without SLURM
        try:
            _drop_links(run, after=snapshot.job)
        except (SchedulerError, OccupiedError) as error:
            # the supervisor cancels them at its end; if not, each ends as soon as it starts
            print(f"warning: jobs that wait for this run are still queued: {error}", file=sys.stderr)
    if wait:
        wait_until(lambda: poll().state.is_final, what=f"{run.root.name} to end", timeout_s=WAIT_S)
    return poll().state


def _check_own_job(run: RunDir) -> None:
    """Raise OccupiedError if another user could have written control/job.json: it names jobs, or a process, to end."""
    try:
        read_own(run.job, run)
    except FileNotFoundError:
        pass
    except OccupiedError as error:
        raise OccupiedError(
            "another user could have written which job, or which process of yours, to end",
            location=error.location or str(run.job),
            hint="only the owner of a run whose files others cannot write can cancel it before it starts",
        ) from error


def _drop_links(run: RunDir, after: dict[str, Any]) -> None:
    """Cancel the jobs that would start after the current one (``after``)."""
    job = read_json_or_none(run.job) or {}
    if job.get("scheduler") != "slurm":
        return
    _check_own_job(run)
    chain = chain_of(job)
    links = chain.after(str(after["job_id"])) if chain is not None else ()
    drop_jobs([*links, *(follow_up["job_id"] for follow_up in job.get("after", {}).values())])


def _drop_job(job: dict[str, Any]) -> None:
    if job.get("scheduler") == "local" and "parent" in job:
        raise OccupiedError(
            "on this machine it is part of one script with the run that it follows",
            hint=f"primerl-hpc cancel {shlex.quote(job['parent'])}",
        )
    if job.get("scheduler") == "local":
        if not is_local_job_alive(job):
            return
        try:
            os.kill(int(job["job_id"]), signal.SIGTERM)
        except ProcessLookupError:
            return
    else:
        drop_jobs([str(job[name]) for name in ("job_id", "engines_job_id") if name in job])
