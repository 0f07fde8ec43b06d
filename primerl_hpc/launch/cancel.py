"""Stops a run: through its supervisor, which saves first; a job that has not started is taken out of the queue."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.common.files import read_json_or_none, wait_until, write_json
from primerl_hpc.common.names import RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.observe.slurm import JobWatcher
from primerl_hpc.observe.snapshot import take_snapshot

WAIT_S = 900.0


def cancel_run(run: RunDir, *, now: bool, wait: bool) -> RunState:
    """The state after the request; a run that has ended stays as it is.

    Raises SchedulerError when the scheduler refuses, TimeoutWaitingError when ``wait`` takes too long.
    """
    jobs = JobWatcher()
    look = lambda: take_snapshot(run, jobs.facts_of([run])).state  # noqa: E731
    state = look()
    if state.is_final or state == RunState.UNKNOWN:
        return state
    if state in (RunState.SUBMITTED, RunState.PENDING):
        _drop_job(run)
        earlier, job = read_json_or_none(run.state) or {}, read_json_or_none(run.job) or {}
        attempt = max(earlier.get("attempt", 0), job.get("attempt", 0))
        write_json(run.state, {**earlier, "state": RunState.CANCELLED.value, "attempt": attempt})
    else:
        write_json(run.stop_request, {"reason": "cancel", "now": now})
    if wait:
        wait_until(lambda: look().is_final, what=f"{run.root.name} to end", timeout_s=WAIT_S)
    return look()


def _drop_job(run: RunDir) -> None:
    job = read_json_or_none(run.job) or {}
    if job.get("scheduler") == "local":
        try:
            os.kill(int(job["job_id"]), signal.SIGTERM)
        except ProcessLookupError:
            return
    elif shutil.which("scancel") is None:
        raise SchedulerError("scancel is not on this machine", mend="cancel from a login node of the cluster")
    else:
        done = subprocess.run(["scancel", str(job["job_id"])], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SchedulerError(f"scancel refused: {done.stderr.strip()}")
