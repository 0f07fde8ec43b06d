"""Stops a run: through its supervisor, which saves first; a job that has not started is taken out of the queue."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from primerl_hpc.common.chain import chain_of
from primerl_hpc.common.errors import OccupiedError, SchedulerError
from primerl_hpc.common.files import read_json_or_none, wait_until, write_json
from primerl_hpc.common.names import RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.launch.chain import drop_jobs
from primerl_hpc.observe.slurm import JobWatcher
from primerl_hpc.observe.snapshot import take_snapshot
from primerl_hpc.runtime.requeue import CANCEL

WAIT_S = 900.0


def cancel_run(run: RunDir, *, now: bool, wait: bool) -> RunState:
    """The state after the request; a run that has ended stays as it is.

    Raises SchedulerError when the scheduler does not let go of a job that waits, TimeoutWaitingError when ``wait`` takes too long.
    """
    jobs = JobWatcher()
    look = lambda: take_snapshot(run, jobs.facts_of([run]))  # noqa: E731
    snapshot = look()
    state = snapshot.state
    if state.is_final or state == RunState.UNKNOWN:
        return state
    if state in (RunState.SUBMITTED, RunState.PENDING):
        _drop_links(run, after=snapshot.job)
        _drop_job(snapshot.job)
        earlier, job = read_json_or_none(run.state) or {}, read_json_or_none(run.job) or {}
        attempt = max(earlier.get("attempt", 0), job.get("attempt", 0))
        write_json(run.state, {**earlier, "state": RunState.CANCELLED.value, "attempt": attempt})
    else:
        write_json(run.stop_request, {"reason": CANCEL, "now": now})  # this needs no SLURM
        try:
            _drop_links(run, after=snapshot.job)
        except (
            SchedulerError
        ) as error:  # the run takes them out at its end, and each ends as soon as it starts
            print(f"warning: what waits for this run is in the queue still: {error}", file=sys.stderr)
    if wait:
        wait_until(lambda: look().state.is_final, what=f"{run.root.name} to end", timeout_s=WAIT_S)
    return look().state


def _drop_links(run: RunDir, after: dict[str, Any]) -> None:
    """The jobs that would start when the present one (``after``) has ended."""
    job = read_json_or_none(run.job) or {}
    if job.get("scheduler") != "slurm":
        return
    chain = chain_of(job)
    links = chain.after(str(after["job_id"])) if chain is not None else ()
    drop_jobs([*links, *(each["job_id"] for each in job.get("after", {}).values())])


def _drop_job(job: dict[str, Any]) -> None:
    if job.get("scheduler") == "local" and "parent" in job:
        raise OccupiedError(
            "on this machine it is one script with the run that it waits for",
            mend=f"primerl-hpc cancel {job['parent']}",
        )
    if job.get("scheduler") == "local":
        try:
            os.kill(int(job["job_id"]), signal.SIGTERM)
        except ProcessLookupError:
            return
    else:
        drop_jobs([str(job[name]) for name in ("job_id", "engines_job_id") if name in job])
