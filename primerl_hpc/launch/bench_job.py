"""Benchmark mode over several nodes: a SLURM job with the script, supervisor, preflight and steps of any run.

    measure_in_job(work, plan, profile)    # returns when the job has written control/bench_result.json

The run has one process, the trainer, whose ranks measure. The command waits for the job and says on stderr what happens. ^C,
SIGTERM and the loss of its terminal end the job; it never goes back into the queue by itself. When the command is killed with -9
the job is left to end by itself, as it does after its few steps.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from primerl_hpc.cluster.load import LoadedProfile
from primerl_hpc.common.errors import ExitCode, RoleError, SchedulerError, TimeoutWaitingError
from primerl_hpc.common.files import is_there, read_json_or_none, wait_until, write_json, write_text
from primerl_hpc.common.names import RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.slurm import JobFact, is_job_over
from primerl_hpc.launch.chain import drop_jobs
from primerl_hpc.launch.prepare import job_script, make_script
from primerl_hpc.launch.submit import queue_run
from primerl_hpc.observe.follow import POLL_S, Follower
from primerl_hpc.observe.slurm import JobWatcher
from primerl_hpc.observe.snapshot import last_words, real_state
from primerl_hpc.plan.types import Plan
from primerl_hpc.runtime.requeue import CANCEL

SUPERVISOR_ENDS_S, SLURM_ENDS_S = 30.0, 120.0
"""How long a job has to end: on request by itself, then at SLURM's hands (which waits 30 s before it kills)."""
RESULT_S = 60.0
"""For a file that a node wrote to reach this machine."""


def measure_in_job(run: RunDir, plan: Plan, profile: LoadedProfile) -> None:
    """Raises SchedulerError when SLURM refuses the job, RoleError when it ends without a result."""
    scheduler = profile.profile.scheduler.model_copy(update={"requeue": False})
    profile = replace(profile, profile=profile.profile.model_copy(update={"scheduler": scheduler}))
    write_text(job_script(run), make_script(plan, profile), mode=0o755)
    with _noted_signals() as noted:
        job = queue_run(run, plan).job_id
        try:
            fault = _follow(run, plan, job, noted)
        finally:
            _end(run, job)
    if noted:
        sys.exit(128 + noted[0])
    if fault is not None:
        raise fault
    wait_until(lambda: is_there(run.bench_result), what=f"the result of job {job}", timeout_s=RESULT_S)


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Those that ask for the end: an exception in the middle of a submission would lose a job that SLURM has taken."""
    noted: list[int] = []
    asking = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN  # as nohup sets it
    ]
    before = {number: signal.signal(number, lambda each, _: noted.append(each)) for number in asking}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(run: RunDir, plan: Plan, job: str, noted: list[int]) -> RoleError | None:
    """Until the run has ended, or somebody asks for its end. What was wrong with it, None for nothing."""
    follower, watcher, said = Follower(run, to_stderr=True), JobWatcher(), None
    follower.say(f"job {job}, {len(plan.nodes)} nodes")
    while not noted:
        facts = watcher.facts_of([run])
        state, message = real_state(
            run, read_json_or_none(run.state) or {}, read_json_or_none(run.job) or {}, facts
        )
        if job in facts and facts[job].is_waiting and not run.state.exists() and message != said:
            follower.say(f"in the queue: {message}")
            said = message
        follower.look()
        if state.is_final:
            return None if state == RunState.DONE else _fault(run, job, state, message, facts.get(job))
        time.sleep(POLL_S)
    follower.say(f"ending job {job}")
    return None


def _fault(run: RunDir, job: str, state: RunState, message: str | None, fact: JobFact | None) -> RoleError:
    """What a role or the preflight said, else what SLURM says and the job's last words."""
    if (failure := read_json_or_none(run.failure)) is not None:
        print(*failure["last_lines"], sep="\n", file=sys.stderr)
        where = f" on {failure['node']}" if failure["node"] else ""
        error = RoleError(f"{failure['process']}{where}: {failure['message']}")
        if failure["exit_code"] in set(ExitCode):
            error.exit_code = ExitCode(failure["exit_code"])
        return error
    if state == RunState.STOPPED:
        return RoleError(
            f"the walltime of job {job} was over before the last step",
            mend="give a longer --time or fewer --steps",
        )
    why = fact.state if fact is not None and fact.has_ended else message or state.value
    words = last_words(run) if state == RunState.FAILED else None
    return RoleError(f"job {job} ended without a result: {why}" + (f" ({words})" if words else ""))


def _end(run: RunDir, job: str) -> None:
    """Until SLURM says that the job is over: by its supervisor, which takes seconds, or by SLURM; a warning when neither helps."""
    if is_job_over(job):
        return
    write_json(run.stop_request, {"reason": CANCEL, "now": True})
    for options, patience_s in ((("--state=PENDING",), SUPERVISOR_ENDS_S), ((), SLURM_ENDS_S)):
        with contextlib.suppress(SchedulerError):
            drop_jobs([*options, job])
        with contextlib.suppress(TimeoutWaitingError):
            wait_until(lambda: is_job_over(job), what=job, timeout_s=patience_s, poll_s=0.5, poll_max_s=2.0)
            return
    print(f"warning: job {job} has not ended yet; look at it: squeue --jobs={job}", file=sys.stderr)
