"""The batch process of one elastic engine: keeps it running for a run in another job, and ends with that run.

    python -m primerl_hpc.runtime.engine_host RUN_DIR INDEX          # a task of launch/engines.sbatch

It starts its engine when the run reaches the phase that needs it, restarts it when it fails, and shows that it is alive
by touching the engine's endpoint file; the run's supervisor deletes an endpoint that is no longer touched
(`members.py`). An engine has nothing to save: on request it leaves at once, and its requests in flight are retried on
other engines.
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

from primerl_hpc.common import env
from primerl_hpc.common.errors import ExitCode, PrimerlError
from primerl_hpc.common.files import read_json_or_none, write_json
from primerl_hpc.common.log import setup_logging
from primerl_hpc.common.names import Role, RunState, process_name
from primerl_hpc.common.waiting import in_daemon_thread, paced
from primerl_hpc.plan.plan import PhasePlan, load_plan, with_interpreter
from primerl_hpc.run.access.ownership import check_own, set_safe_umask
from primerl_hpc.run.endpoints import forget_endpoints, read_endpoint, take_restart_request
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.files.journal import run_directory_errors
from primerl_hpc.runtime.job.requeue import requeue
from primerl_hpc.runtime.job.walltime import CHECK_AGAIN_S, RESERVE_S
from primerl_hpc.runtime.policy import Action, PhasePolicy, ProcessExit
from primerl_hpc.runtime.step import Launch
from primerl_hpc.runtime.steps.bundle import remove_bundle
from primerl_hpc.runtime.steps.guard import PR_SET_CHILD_SUBREAPER, children_of, prctl
from primerl_hpc.runtime.steps.local import LocalStep, end_orphans
from primerl_hpc.slurm.commands import seconds_left
from primerl_hpc.slurm.jobs import is_job_over
from primerl_hpc.slurm.question_floor import QuestionFloor

POLL_S, IDLE_LOOK_S = 0.5, 10.0
"""Interval between checks of the engine's process; and of the run directory while nothing changes (`paced`)."""
TOUCH_EVERY_S = 4.0
QUIET_S = 15.0
"""A running supervisor touches its lock every 5 s."""
SUBMITTER_S = 60.0
"""The submitter records our job id within this time after our start."""
TEARDOWN_S = 8.0
INCARNATIONS_PER_START = 1000
"""The next start of the job (after a requeue) numbers its incarnations from the next multiple of this."""

log = setup_logging("engine_host")


class EngineHost:
    def __init__(self, run: RunDir, index: int) -> None:
        self.run_dir, self.name = run, process_name(Role.INFERENCE, index)
        check_own(run)
        self.plan = with_interpreter(load_plan(run), sys.executable)
        self.job = os.environ.get("SLURM_ARRAY_JOB_ID")
        self.incarnation = INCARNATIONS_PER_START * env.integer("SLURM_RESTART_COUNT", 0)
        self.inherited = frozenset(children_of(os.getpid()))
        self.attempt = 1
        """Attempt of the run whose API keys the engine uses."""
        self.step: LocalStep | None = None
        self.waiter: asyncio.Task[Any] | None = None
        self.endpoint: dict[str, Any] | None = None
        self.leaving: int | None = None
        self.restart_at, self.ready_by = 0.0, math.inf
        self.started_at = time.monotonic()
        self.touched_at = self.next_walltime_check = self.next_look = 0.0
        self.changed_at = self.started_at
        """Last start, exit or publication of the engine."""
        self.state: dict[str, Any] = {}
        """The run's state as of the last look."""
        self.leave_at = math.inf
        """When the walltime is near, according to SLURM's last answer."""
        self.questions = QuestionFloor(run.slurm_questions, self.plan.ask_every_s)
        self.lock_touched, self.lock_seen_at = 0.0, self.started_at

    async def run(self) -> ExitCode:
        """Serve until the run is over, this job has to leave, or the engine keeps failing."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        phase = next(phase for phase in self.plan.phases if phase.elastic)
        policy, errors = PhasePolicy(phase), run_directory_errors()
        try:
            while not self.leaving:
                with errors:
                    if self.waiter is not None and self.waiter.done() and not self._schedule_restart(policy):
                        return ExitCode.FAILED
                    if time.monotonic() >= self.next_look and await self._look(phase):
                        break
                    self._touch_endpoint()
                if await self._is_time_over():
                    self._on_signal(signal.SIGUSR2)
                await asyncio.sleep(POLL_S)
        finally:
            await self._end()
        return await self._leave()

    async def _look(self, phase: PhasePlan) -> bool:
        """Check the run directory: start, check or restart the engine. True if the run is over."""
        if await in_daemon_thread(self._is_run_over):
            return True
        if self.waiter is None and self._is_wanted(phase) and time.monotonic() >= self.restart_at:
            await self._start(phase)
        await self._check_engine()
        now = time.monotonic()
        self.next_look = now + paced(now - self.changed_at, POLL_S, IDLE_LOOK_S)
        return False

    def _note_change(self) -> None:
        self.changed_at, self.next_look = time.monotonic(), 0.0

    # -- the engine --------------------------------------------------------------------------------

    async def _start(self, phase: PhasePlan) -> None:
        self.attempt = attempt = self._attempt_of_run()
        self.run_dir.restart_request(self.name).unlink(missing_ok=True)
        forget_endpoints(self.run_dir, self.name)
        process = phase.process(self.name)
        launch = Launch(process, self.run_dir, phase.name, attempt, self.incarnation)
        if self.step is not None:
            await end_orphans((), self.inherited)
        self.step = LocalStep(launch, has_gpus=self.plan.accelerator == "gpu")
        log.info("Starting %s, incarnation %d, log %s", self.name, self.incarnation, launch.log)
        self.step.prepare()
        await self.step.start()
        self.ready_by = time.monotonic() + process.ready_timeout_s if process.ready_timeout_s else math.inf
        self.waiter = asyncio.create_task(self.step.wait())
        self._note_change()

    def _attempt_of_run(self) -> int:
        return int(self.state.get("attempt", 1)) if self.state else self.attempt

    def _schedule_restart(self, policy: PhasePolicy) -> bool:
        """Handle the engine's exit; return True if it will be restarted."""
        assert self.waiter is not None
        # may raise OSError: read before anything is changed, so that a retry is safe
        progress = self.run_dir.progress()
        status, self.waiter, self.endpoint = self.waiter.result(), None, None
        self._forget_endpoint()
        decision = policy.on_exit(self.name, ProcessExit(status.code, progress))
        log.warning("%s exited: %s; %s %s", self.name, status, decision.action.value, decision.reason)
        self.incarnation += 1
        self.restart_at = time.monotonic() + decision.delay_s
        self._note_change()
        return decision.action == Action.RESTART

    async def _check_engine(self) -> None:
        """Keep the endpoint published and fresh; end the engine if it is not ready in time or on a restart request."""
        if self.waiter is None or self.step is None:
            return
        if self._attempt_of_run() != self.attempt:
            log.info("Restarting %s: a new attempt of the run has new API keys", self.name)
            self.endpoint, self.attempt = None, self._attempt_of_run()
            self._forget_endpoint()
            await self.step.terminate()
            return
        path = self.run_dir.endpoint(self.name)
        found = read_endpoint(self.run_dir, self.name)
        if found is not None and found["incarnation"] == self.incarnation:
            if self.endpoint is None:
                self._note_change()
            self.endpoint = found
        elif self.endpoint is not None:
            # we were slow, and the supervisor took our endpoint for that of a lost node
            write_json(path, self.endpoint)
        if self.endpoint is None and time.monotonic() > self.ready_by:
            log.warning("%s was not ready in time", self.name)
            self.ready_by = math.inf
            await self.step.kill()
        if take_restart_request(self.run_dir, self.name, self.incarnation) is not None:
            self.endpoint = None
            self._forget_endpoint()
            await self.step.terminate()

    def _touch_endpoint(self) -> None:
        if self.endpoint is not None and time.monotonic() - self.touched_at >= TOUCH_EVERY_S:
            self.touched_at = time.monotonic()
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.run_dir.endpoint(self.name))

    async def _end(self) -> None:
        """Withdraw the endpoint first, then end the process."""
        self._forget_endpoint()
        if self.waiter is None or self.step is None:
            return
        await self.step.terminate()
        _, late = await asyncio.wait({self.waiter}, timeout=TEARDOWN_S)
        if late:
            await self.step.kill()
            await asyncio.wait(late, timeout=TEARDOWN_S)
        self._forget_endpoint()  # the engine may have published it again meanwhile

    def _forget_endpoint(self) -> None:
        """Delete the endpoint; if that fails it is at least no longer touched, which the supervisor notices."""
        with contextlib.suppress(OSError):
            forget_endpoints(self.run_dir, self.name)

    # -- the run -----------------------------------------------------------------------------------

    def _is_wanted(self, phase: PhasePlan) -> bool:
        """True if the run is in the phase of the engines and this job is their current one."""
        job = read_json_or_none(self.run_dir.job) or {}
        is_ours = job.get("engines_job_id") in (None, self.job)
        is_running = self.state.get("state") == RunState.RUNNING
        return is_ours and is_running and self.state.get("phase") == phase.name

    def _is_run_over(self) -> bool:
        """True if the run is done or was submitted again; or if its supervisor is quiet and SLURM reports its end.

        A job that failed with a lost node may be requeued, and so may one that saved after a SIGTERM, if it was
        preempted or requeued by someone else: then its engines wait for it.
        """
        self.state = state = read_json_or_none(self.run_dir.state) or {}
        job = read_json_or_none(self.run_dir.job) or {}
        engines = job.get("engines_job_id")
        if engines not in (None, self.job) and time.monotonic() - self.started_at > SUBMITTER_S:
            return True
        written = RunState(state["state"]) if state.get("attempt", 0) >= job.get("attempt", 1) else None
        if written == RunState.DONE:
            return True
        is_quiet = self._is_supervisor_quiet() and "job_id" in job
        return is_quiet and self.questions.is_over(job["job_id"], is_job_over)

    def _is_supervisor_quiet(self) -> bool:
        """True if its lock is missing or was not touched for a while, by our own clock: clocks of nodes differ."""
        try:
            touched = self.run_dir.supervisor_lock.stat().st_mtime
        except FileNotFoundError:
            return True
        if touched != self.lock_touched:
            self.lock_touched, self.lock_seen_at = touched, time.monotonic()
        return time.monotonic() - self.lock_seen_at > QUIET_S

    async def _is_time_over(self) -> bool:
        """True if the walltime is near. SLURM's warning is lost if sent before our start; limits may change."""
        job, now = os.environ.get("SLURM_JOB_ID"), time.monotonic()
        if job is None or now < self.next_walltime_check:
            return False
        with contextlib.suppress(OSError):  # the walltime does not wait for the shared folder
            if now >= self.leave_at:  # nor for the questions of other processes
                await in_daemon_thread(self.questions.note)
            elif not await in_daemon_thread(self.questions.may_ask):
                return False
        if (left_s := await seconds_left(job)) is not None:
            self.leave_at = now + left_s - RESERVE_S
        self.next_walltime_check = min(self.leave_at, now + CHECK_AGAIN_S)
        return now >= self.leave_at

    def _on_signal(self, number: int) -> None:
        self.leaving = self.leaving or number

    async def _leave(self) -> ExitCode:
        """Requeue after a walltime warning. After a SIGTERM SLURM requeues the job itself if it was preempted."""
        task = os.environ.get("SLURM_ARRAY_TASK_ID")
        if self.leaving == signal.SIGUSR2 and self.job and task:
            refused = await requeue(f"{self.job}_{task}")
            log.info("The walltime is near; %s", refused or "requeued")
        return ExitCode.DONE


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 2 or not arguments[1].isdigit():
        print("usage: python -m primerl_hpc.runtime.engine_host RUN_DIR INDEX", file=sys.stderr)
        return ExitCode.USAGE
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    set_safe_umask()
    env.leave_open_folder()
    try:
        host = EngineHost(RunDir(Path(arguments[0]).resolve()), int(arguments[1]))
        return remove_bundle(asyncio.run(host.run()), host.plan)
    except PrimerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {arguments[0]}: cannot read the run directory: {error}", file=sys.stderr)
        return ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())
