"""Benchmark mode in a SLURM job with the script, supervisor, preflight and steps of any run.

    measure_in_job(work, plan, profile)                # returns when the job has written control/bench_result.json
    run_job(work, plan, profile, is_measured)          # ends the job when is_measured() is true

`measure_in_job` is for runs with one process, the trainer, whose ranks measure. The command waits for the job and
prints its progress to stderr. ^C, SIGTERM and the loss of its terminal end the job; it is never requeued. If the
command is killed with SIGKILL, the job ends by itself after its few steps.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from primerl_hpc.cluster.load import LoadedProfile
from primerl_hpc.common.errors import ExitCode, RoleError, SchedulerError, TimeoutWaitingError
from primerl_hpc.common.files import is_there, read_json_or_none, write_json, write_text
from primerl_hpc.common.log import show_warnings
from primerl_hpc.common.names import RunState
from primerl_hpc.common.package import package_root
from primerl_hpc.common.waiting import wait_until
from primerl_hpc.launch.compose import make_scripts
from primerl_hpc.launch.queue import drop_jobs
from primerl_hpc.launch.submit import queue_run
from primerl_hpc.observe.follow import POLL_S, RunFollower
from primerl_hpc.observe.status.job_watcher import JobWatcher
from primerl_hpc.observe.status.snapshot import last_job_output, real_state
from primerl_hpc.plan.plan import Plan
from primerl_hpc.render.lint import warnings_of
from primerl_hpc.run.rundir import CANCEL, RunDir
from primerl_hpc.slurm.jobs import JobFact, is_job_over

SUPERVISOR_ENDS_S, SLURM_ENDS_S = 30.0, 120.0
"""How long a job may take to end: first on request, then after scancel (SLURM waits 30 s before it kills)."""
RESULT_S = 60.0
"""Time for a file written on a node to become visible on this machine."""


def measure_in_job(run: RunDir, plan: Plan, profile: LoadedProfile) -> None:
    """Run the job until it has written its result; errors as in `run_job`."""
    job = run_job(run, plan, profile)
    wait_until(lambda: is_there(run.bench_result), what=f"the result of job {job}", timeout_s=RESULT_S)


def run_job(
    run: RunDir, plan: Plan, profile: LoadedProfile, is_measured: Callable[[], bool] = lambda: False
) -> str:
    """Run the job to its end, or until ``is_measured()``. Return its id.

    Raises SchedulerError if SLURM refuses it, RoleError if it fails.
    """
    scheduler = profile.profile.scheduler.model_copy(update={"requeue": False})
    profile = replace(profile, profile=profile.profile.model_copy(update={"scheduler": scheduler}))
    write_scripts(run, plan, profile)
    with _record_signals() as received:
        job = queue_run(run, plan).job_id
        try:
            fault = _follow(run, plan, job, lambda: bool(received) or is_measured())
        finally:
            _end(run, job)
    if received:
        sys.exit(128 + received[0])
    if fault is not None:
        raise fault
    return job


def write_scripts(run: RunDir, plan: Plan, profile: LoadedProfile) -> None:
    """Write the batch script and what it sources."""
    scripts = make_scripts(plan, profile, package_root())
    show_warnings(warnings_of(scripts["job.sbatch"]))
    for name, text in scripts.items():
        write_text(run.launch / name, text, mode=0o755)


@contextlib.contextmanager
def _record_signals() -> Iterator[list[int]]:
    """Record termination signals: an exception during a submission would lose a job that SLURM has accepted."""
    received: list[int] = []
    handled = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN  # e.g. set by nohup
    ]
    before = {number: signal.signal(number, lambda caught, _: received.append(caught)) for number in handled}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(run: RunDir, plan: Plan, job: str, is_over: Callable[[], bool]) -> RoleError | None:
    """Wait until the run has ended or ``is_over()``. Return the failure, None without one."""
    follower, watcher, printed = RunFollower(run, to_stderr=True), JobWatcher(), None
    follower.print_line(f"job {job}, {len(plan.nodes)} nodes")
    while not is_over():
        facts = watcher.facts_of([run])
        state, message = real_state(
            run, read_json_or_none(run.state) or {}, read_json_or_none(run.job) or {}, facts
        )
        if job in facts and facts[job].is_waiting and not run.state.exists() and message != printed:
            follower.print_line(f"in the queue: {message}")
            printed = message
        follower.poll()
        if state.is_final:
            return None if state == RunState.DONE else _fault(run, job, state, message, facts.get(job))
        time.sleep(POLL_S)
    follower.print_line(f"ending job {job}")
    return None


def _fault(run: RunDir, job: str, state: RunState, message: str | None, fact: JobFact | None) -> RoleError:
    """Return the failure that a role or the preflight reported, else the job's state and its last log lines."""
    if (error := reported_failure(run)) is not None:
        return error
    if state == RunState.STOPPED:
        return RoleError(
            f"the walltime of job {job} ended before the last step",
            hint="use a longer --time or fewer --steps",
        )
    why = fact.state if fact is not None and fact.has_ended else message or state.value
    output = last_job_output(run) if state == RunState.FAILED else None
    return RoleError(f"job {job} ended without a result: {why}" + (f" ({output})" if output else ""))


def reported_failure(run: RunDir) -> RoleError | None:
    """Return the failure that the supervisor recorded, after printing its log lines; None without one."""
    if (failure := read_json_or_none(run.failure)) is None:
        return None
    print(*failure["last_lines"], sep="\n", file=sys.stderr)
    where = f" on {failure['node']}" if failure["node"] else ""
    error = RoleError(f"{failure['process']}{where}: {failure['message']}")
    if failure["exit_code"] in set(ExitCode):
        error.exit_code = ExitCode(failure["exit_code"])
    return error


def _end(run: RunDir, job: str) -> None:
    """End the job through its supervisor, which takes seconds, else through SLURM; print a warning if neither works."""
    if is_job_over(job):
        return
    write_json(run.stop_request, {"reason": CANCEL, "now": True})
    for options, patience_s in ((("--state=PENDING",), SUPERVISOR_ENDS_S), ((), SLURM_ENDS_S)):
        with contextlib.suppress(SchedulerError):
            drop_jobs([*options, job])
        with contextlib.suppress(TimeoutWaitingError):
            wait_until(lambda: is_job_over(job), what=job, timeout_s=patience_s, poll_s=0.5, poll_max_s=2.0)
            return
    print(f"warning: job {job} has not ended yet; check it with: squeue --jobs={job}", file=sys.stderr)
