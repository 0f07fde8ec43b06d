"""The batch process of one elastic engine: keeps it alive beside a run that is another job, and ends with that run.

    python -m primerl_hpc.runtime.engine_host RUN_DIR INDEX          # a task of launch/engines.sbatch

It starts its engine when the run has come to the phase that needs it, starts it again when it dies, and tells that it
is there by touching the engine's endpoint; the run's supervisor drops an endpoint that nobody touches (`elastic.py`).
An engine has nothing to save: told to leave, it goes at once, and its requests in flight are tried again elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import ExitCode, PrimerlError
from primerl_hpc.common.files import read_json_or_none, write_json
from primerl_hpc.common.log import setup_logging
from primerl_hpc.common.names import Role, RunState, process_name
from primerl_hpc.common.restart_requests import take_restart_request
from primerl_hpc.common.rundir import RunDir, forget_endpoints, read_endpoint
from primerl_hpc.common.slurm import is_job_over
from primerl_hpc.plan.types import PhasePlan, load_plan
from primerl_hpc.runtime.allocation import seconds_left
from primerl_hpc.runtime.guard import PR_SET_CHILD_SUBREAPER, children_of, prctl
from primerl_hpc.runtime.journal import run_directory_patience
from primerl_hpc.runtime.local_step import LocalStep, end_orphans
from primerl_hpc.runtime.policy import Action, PhasePolicy
from primerl_hpc.runtime.requeue import requeue
from primerl_hpc.runtime.steps import Launch
from primerl_hpc.runtime.walltime import LOOK_AGAIN_S, RESERVE_S

POLL_S = 0.5
TOUCH_EVERY_S = 2.0
ASK_SLURM_EVERY_S = 5.0
QUIET_S = 15.0
"""A supervisor touches its lock every 5 s."""
SUBMITTER_S = 60.0
"""Within this time after our start the submitter has written down which job we are."""
TEARDOWN_S = 8.0
LIVES_PER_START = 1000
"""Incarnations of one start of the job: its next start (a requeue) counts on from there."""

log = setup_logging("engine_host")


class EngineHost:
    def __init__(self, run: RunDir, index: int) -> None:
        self.run_dir, self.name = run, process_name(Role.INFERENCE, index)
        self.plan = load_plan(run)
        self.job = os.environ.get("SLURM_ARRAY_JOB_ID")
        self.incarnation = LIVES_PER_START * int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self.inherited = frozenset(children_of(os.getpid()))
        self.step: LocalStep | None = None
        self.waiter: asyncio.Task[Any] | None = None
        self.endpoint: dict[str, Any] | None = None
        self.leaving: int | None = None
        self.restart_at, self.ready_by = 0.0, math.inf
        self.started_at = time.monotonic()
        self.touched_at = self.asked_at = self.next_look_at_walltime = 0.0
        self.lock_touched, self.lock_seen_at = 0.0, self.started_at

    async def run(self) -> ExitCode:
        """Until the run is over, or this job is to leave, or the engine does not live."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        phase = next(each for each in self.plan.phases if each.elastic)
        policy, patience = PhasePolicy(phase), run_directory_patience()
        try:
            while not self.leaving:
                with patience:
                    if await asyncio.to_thread(self._is_run_over):
                        break
                    if self.waiter is None and self._is_wanted(phase) and time.monotonic() >= self.restart_at:
                        await self._start(phase)
                    if self.waiter is not None and self.waiter.done() and not self._goes_on(policy):
                        return ExitCode.FAILED
                    await self._look_after()
                if await self._is_time_over():
                    self._on_signal(signal.SIGUSR2)
                await asyncio.sleep(POLL_S)
        finally:
            await self._end()
        return await self._leave()

    # -- the engine ------------------------------------------------------------------------------------------------

    async def _start(self, phase: PhasePlan) -> None:
        attempt = int((read_json_or_none(self.run_dir.state) or {}).get("attempt", 1))
        self.run_dir.restart_request(self.name).unlink(missing_ok=True)
        forget_endpoints(self.run_dir, self.name)
        process = phase.process(self.name)
        launch = Launch(process, self.run_dir, phase.name, attempt, self.incarnation)
        if self.step is not None:
            await end_orphans((), self.inherited)
        self.step = LocalStep(launch, has_gpus=self.plan.accelerator == "gpu")
        log.info("starts %s, incarnation %d, log %s", self.name, self.incarnation, launch.log)
        await self.step.start()
        self.ready_by = time.monotonic() + process.ready_timeout_s if process.ready_timeout_s else math.inf
        self.waiter = asyncio.create_task(self.step.wait())

    def _goes_on(self, policy: PhasePolicy) -> bool:
        """After the engine's end: whether it is started again, and when."""
        assert self.waiter is not None
        progress = self.run_dir.progress()  # where this fails nothing is changed, and all of it tried again
        status, self.waiter, self.endpoint = self.waiter.result(), None, None
        self._forget()
        decision = policy.on_exit(self.name, status.code, progress=progress)
        log.warning("%s ended: %s; %s %s", self.name, status, decision.action.value, decision.reason)
        self.incarnation += 1
        self.restart_at = time.monotonic() + decision.delay_s
        return decision.action == Action.RESTART

    async def _look_after(self) -> None:
        """Keep its endpoint published and fresh; end it when it is not ready in time or its restart was asked for."""
        if self.waiter is None or self.step is None:
            return
        path = self.run_dir.endpoint(self.name)
        found = read_endpoint(self.run_dir, self.name)
        if found is not None and found["incarnation"] == self.incarnation:
            self.endpoint = found
        elif self.endpoint is not None:
            # a new attempt of the run cleared it away, or we were slow and it was taken for that of a lost node
            write_json(path, self.endpoint)
        if self.endpoint is not None and time.monotonic() - self.touched_at >= TOUCH_EVERY_S:
            self.touched_at = time.monotonic()
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)
        if self.endpoint is None and time.monotonic() > self.ready_by:
            log.warning("%s was not ready in time", self.name)
            self.ready_by = math.inf
            await self.step.kill()
        if take_restart_request(self.run_dir, self.name, self.incarnation) is not None:
            self.endpoint = None
            self._forget()
            await self.step.terminate()

    async def _end(self) -> None:
        """First out of the run's sight, then the process."""
        self._forget()
        if self.waiter is None or self.step is None:
            return
        await self.step.terminate()
        _, late = await asyncio.wait({self.waiter}, timeout=TEARDOWN_S)
        if late:
            await self.step.kill()
            await asyncio.wait(late, timeout=TEARDOWN_S)
        self._forget()  # it may have published itself in between

    def _forget(self) -> None:
        """What stays because the run directory falters is not touched any more, which the supervisor sees."""
        with contextlib.suppress(OSError):
            forget_endpoints(self.run_dir, self.name)

    # -- the run ---------------------------------------------------------------------------------------------------

    def _is_wanted(self, phase: PhasePlan) -> bool:
        """The run is in the phase of the engines, and we are they; in a warm-up nobody asks for them."""
        state, job = read_json_or_none(self.run_dir.state) or {}, read_json_or_none(self.run_dir.job) or {}
        is_ours = job.get("engines_job_id") in (None, self.job)
        return is_ours and state.get("phase") == phase.name and state.get("state") == RunState.RUNNING

    def _is_run_over(self) -> bool:
        """Its files say so, or are those of a later submission; or it failed, or is silent, and SLURM says: over.

        A job that failed for a lost node may be put back into the queue, and one that saved after a SIGTERM is when it was
        preempted or requeued from outside: then its engines wait for it.
        """
        state, job = read_json_or_none(self.run_dir.state) or {}, read_json_or_none(self.run_dir.job) or {}
        engines = job.get("engines_job_id")
        if engines not in (None, self.job) and time.monotonic() - self.started_at > SUBMITTER_S:
            return True
        written = RunState(state["state"]) if state.get("attempt", 0) >= job.get("attempt", 1) else None
        if written == RunState.DONE:
            return True
        is_quiet = self._is_supervisor_quiet() and "job_id" in job
        if not is_quiet or time.monotonic() - self.asked_at < ASK_SLURM_EVERY_S:
            return False
        self.asked_at = time.monotonic()
        return is_job_over(job["job_id"])

    def _is_supervisor_quiet(self) -> bool:
        """Its lock is gone, or was not touched for a while: by our own clock, for those of two nodes differ."""
        try:
            touched = self.run_dir.supervisor_lock.stat().st_mtime
        except FileNotFoundError:
            return True
        if touched != self.lock_touched:
            self.lock_touched, self.lock_seen_at = touched, time.monotonic()
        return time.monotonic() - self.lock_seen_at > QUIET_S

    async def _is_time_over(self) -> bool:
        """SLURM's warning is lost where it came before this process, and the limit of a job may be changed."""
        job, now = os.environ.get("SLURM_JOB_ID"), time.monotonic()
        if job is None or now < self.next_look_at_walltime:
            return False
        left_s = await seconds_left(job)
        rest_s = math.inf if left_s is None else left_s - RESERVE_S
        self.next_look_at_walltime = now + min(rest_s, LOOK_AGAIN_S)
        return rest_s <= 0

    def _on_signal(self, number: int) -> None:
        self.leaving = self.leaving or number

    async def _leave(self) -> ExitCode:
        """The walltime's warning: back into the queue. After a SIGTERM SLURM does that, when it is a preemption."""
        task = os.environ.get("SLURM_ARRAY_TASK_ID")
        if self.leaving == signal.SIGUSR2 and self.job and task:
            refused = await requeue(f"{self.job}_{task}")
            log.info("the walltime is near; %s", refused or "back in the queue")
        return ExitCode.DONE


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 2 or not arguments[1].isdigit():
        print("usage: python -m primerl_hpc.runtime.engine_host RUN_DIR INDEX", file=sys.stderr)
        return ExitCode.USAGE
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        return asyncio.run(EngineHost(RunDir(Path(arguments[0]).resolve()), int(arguments[1])).run())
    except PrimerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {arguments[0]}: the run directory does not answer: {error}", file=sys.stderr)
        return ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())
