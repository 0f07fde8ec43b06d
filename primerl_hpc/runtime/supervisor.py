"""The supervisor: batch process of a run. Starts and restarts all processes, records the root cause, ends the run.

    python -m primerl_hpc.runtime.supervisor RUN_DIR
    python -m primerl_hpc.runtime.supervisor RUN_DIR --setup-failure STATUS LINE OUTPUT

One attempt: acquire the lock, find the checkpoint to continue from, then for each phase of the plan start its processes
and wait for exits, requests and signals until the policy decides that the phase has ended. The exit code is the job's
(`ExitCode`). Only the supervisor writes control/state.json, events.jsonl and failure.json.

The batch script uses the second form when one of its setup lines fails. The attempt then fails with ExitCode.CONFIG
before its first process, so that `status` and `diagnose` show the line, and a chain ends: the next job would fail at
the same line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.errors import ExitCode, OccupiedError, PrimerlError, TimeoutWaitingError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.log import change_logging, setup_logging
from primerl_hpc.common.names import RunState
from primerl_hpc.common.node.limits import raise_limits
from primerl_hpc.common.package import code_name
from primerl_hpc.common.safety.error_text import describe_error
from primerl_hpc.common.waiting import IO_RETRY_LIMIT_S, in_daemon_thread
from primerl_hpc.plan.plan import load_plan, with_interpreter
from primerl_hpc.run.access.ownership import check_own, set_safe_umask
from primerl_hpc.run.lock import TOUCH_EVERY_S
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.allocation import (
    Allocation,
    arrange_by_switch,
    components_started_together,
    read_allocation,
)
from primerl_hpc.runtime.context import JobClock, RunContext, StopRequests
from primerl_hpc.runtime.failures import setup_fault
from primerl_hpc.runtime.files.earlier_attempt import clear_earlier_attempt
from primerl_hpc.runtime.files.journal import Journal, retry_run_directory
from primerl_hpc.runtime.job.auto_split import apply_advised_split
from primerl_hpc.runtime.job.handoff import Handoff
from primerl_hpc.runtime.job.no_proxy import addresses_of, no_proxy_variables
from primerl_hpc.runtime.job.nodes import Nodes
from primerl_hpc.runtime.job.requeue import WALLTIME
from primerl_hpc.runtime.phase import PhaseRun
from primerl_hpc.runtime.step import Continuation, PhaseEnd
from primerl_hpc.runtime.step_history import is_phase_done, next_start, rewind_phase
from primerl_hpc.runtime.steps.bundle import remove_bundle
from primerl_hpc.runtime.steps.guard import PR_SET_CHILD_SUBREAPER, children_of, end_descendants, prctl
from primerl_hpc.slurm.command_lines import cancel_command
from primerl_hpc.slurm.commands import run_slurm
from primerl_hpc.slurm.question_floor import QuestionFloor

HANDLED = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)

log = setup_logging("supervisor")


async def abandon(task: asyncio.Task[None] | None) -> None:
    """Cancel a task that may await a SLURM command, and wait for its end.

    A supervisor must do so before it reaps all its children: asyncio would wait forever for the command that was
    reaped.
    """
    if task is not None:
        task.cancel()
        await asyncio.wait({task})


class Supervisor:
    def __init__(self, run: RunDir, setup_fault: PrimerlError | None = None) -> None:
        """``setup_fault``: why the batch script could not prepare the attempt."""
        self.run_dir, self.setup_fault = run, setup_fault
        check_own(run)
        self.plan = with_interpreter(load_plan(run), sys.executable)
        chosen = self.plan.phases[-1].recipe.log
        change_logging(chosen.level, verifiers=chosen.verifiers, is_json=chosen.format == "json")
        self.earlier: dict[str, Any] = read_json_or_none(run.state) or {}
        self.attempt = int(self.earlier.get("attempt", 0)) + 1
        self.journal = Journal(run, self.attempt)
        self.stop = StopRequests(run, self.journal)
        self.clock = JobClock(self.journal)
        self.context = RunContext(run, self.plan, self.attempt, self.journal, self.clock, self.stop)
        self.handoff = Handoff(self.context)
        self.current: PhaseRun | None = None
        self.nodes: Nodes | None = None
        self.warning: asyncio.Task[None] | None = None
        self.resumed_from: float | None = None
        """The step after which the current phase started; None before the first phase."""
        self.has_finished_a_phase = False
        self.inherited = frozenset(children_of(os.getpid()))
        """Children that we did not start: the batch script became this process and may have started some."""
        self.main: asyncio.Task[Any] | None = None

    # -- one attempt -------------------------------------------------------------------------------

    async def run(self) -> ExitCode:
        self.journal.lock.acquire()
        self.main = asyncio.current_task()
        heartbeat = asyncio.create_task(self._keep_lock_alive())
        try:
            if (code := await self.handoff.start()) is not None:
                return code
            self._install_signal_handlers()
            split = await self._change_split()
            await self._open_attempt()
            if split:
                self.journal.record(
                    "split_advice",
                    message=" ".join(split.values()),
                    applied="sentence" in split,
                )
            if self.setup_fault is not None:
                return await self._fail_by_ourselves(self.setup_fault, "the setup of its job failed")
            if self.stop.is_requested():
                return await self._end_before_start()
            await self._read_allocation()
            if self.nodes is not None and not await components_started_together(self.nodes.allocation):
                self.journal.is_closing = True
                return await self._requeue_whole_job()
            if self.nodes is not None and not await self.nodes.check():
                self.journal.is_closing = True
                return await self._requeue_without_bad_nodes(self.nodes)
            return await self._run_phases()
        except asyncio.CancelledError:
            if not self.journal.is_taken_over:  # a signal before the first phase
                return await self._end_before_start()
            raise OccupiedError(
                "another supervisor took over this run directory", location=str(self.run_dir.root)
            ) from None
        except Exception as error:
            if not self.journal.state:
                raise
            return await self._fail_by_ourselves(error)
        finally:
            await self.journal.settle()
            with contextlib.suppress(OSError, TimeoutWaitingError):
                await self._cancel_waiting_engines()
            heartbeat.cancel()
            await abandon(self.warning)
            end_descendants(grace_s=0.0)  # orphans whose guard was killed: we are their subreaper
            await self.journal.release_lock(with_reserve=True)
            # a signal that arrives now would reach an event loop that is closing; the exit code is decided
            signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)

    async def _run_phases(self) -> ExitCode:
        journal = self.journal
        for phase in self.plan.phases:
            run = self.run_dir.phase(phase.name)
            if await retry_run_directory(partial(is_phase_done, run, phase)):
                continue
            if self.stop.signals or await retry_run_directory(self.stop.is_requested):
                return await self._end_before_start()  # received during the teardown of the previous phase
            resumed = self.resumed_from = await retry_run_directory(
                partial(rewind_phase, self.run_dir, phase)
            )
            journal.state.setdefault("began", {"phase": phase.name, "step": resumed})
            journal.set_state(RunState.RUNNING, phase=phase.name, resumed_from=resumed)
            journal.record(
                "phase_started", phase=phase.name, kind=phase.recipe.kind.value, resumed_from=resumed
            )
            self.current = await in_daemon_thread(
                partial(
                    PhaseRun, self.context, phase, self.nodes, resumed_from=resumed, inherited=self.inherited
                )
            )
            end = await self.current.run()
            if end != PhaseEnd.DONE:
                journal.is_closing = True
                saved = await retry_run_directory(run.latest_checkpoint, limit_s=IO_RETRY_LIMIT_S)
                return await self._close(end, saved or 0)
            self.current, self.has_finished_a_phase = None, True
            journal.record("phase_done", phase=phase.name)
        journal.is_closing = True
        await self.handoff.cancel_waiting()
        journal.set_state(RunState.DONE)
        journal.record("run_done")
        return ExitCode.DONE

    async def _end_before_start(self) -> ExitCode:
        """End on request, by a user or the scheduler, before the first phase or between two phases."""
        self.journal.is_closing = True
        return await self._close(PhaseEnd.ABANDONED, await self._saved())

    async def _fail_by_ourselves(self, error: Exception, reason: str = "the supervisor failed") -> ExitCode:
        """Record an error of the supervisor itself like any other failure."""
        self.journal.is_closing = True
        if isinstance(error, PrimerlError):  # its text is written for users
            log.error("%s", error)
            message, code = str(error), error.exit_code
        else:
            log.exception("The supervisor failed")
            message, code = describe_error(error), ExitCode.FAILED
        self.journal.write_own_failure(reason, message, code)
        end = await self._close(PhaseEnd.FAILED, await self._saved())
        return code if end == ExitCode.FAILED else end

    async def _saved(self) -> int:
        """Return the step after which an attempt would continue now."""
        start = await retry_run_directory(
            partial(next_start, self.run_dir, self.plan), limit_s=IO_RETRY_LIMIT_S
        )
        return (start or {"step": 0})["step"]

    async def _close(self, end: PhaseEnd, saved: int) -> ExitCode:
        journal = self.journal
        await journal.settle()
        result = await self._hand_over(end, saved) if self.nodes is not None else Continuation.ended()
        if result.is_automatic:
            codes = {PhaseEnd.STOPPED: ExitCode.STOPPED, PhaseEnd.ABANDONED: ExitCode.PREEMPTED}
            return codes.get(end, ExitCode.FAILED)
        await self.handoff.cancel_waiting()
        journal.write(lambda: self.run_dir.stop_request.unlink(missing_ok=True))  # served
        journal.state["message"] = result.reason or None
        if end == PhaseEnd.ABANDONED and self.current is not None and self.current.is_out_of_nodes:
            return self._fail(result.reason)
        if end == PhaseEnd.ABANDONED and not result.reason:  # requested by a user
            journal.set_state(RunState.CANCELLED)
            journal.record("run_cancelled")
            return ExitCode.PREEMPTED
        if end in (PhaseEnd.STOPPED, PhaseEnd.ABANDONED):
            journal.set_state(RunState.STOPPED)
            journal.record("run_stopped")
            return ExitCode.STOPPED if end == PhaseEnd.STOPPED else ExitCode.PREEMPTED
        return self._fail(result.reason)

    async def _hand_over(self, end: PhaseEnd, saved: int) -> Continuation:
        is_new = self.resumed_from is not None and saved > self.resumed_from
        return await self.handoff.hand_over(
            end,
            saved,
            progressed=self.has_finished_a_phase or is_new,
            excluded=self.nodes.excluded if self.nodes is not None else (),
        )

    def _fail(self, reason: str = "") -> ExitCode:
        failure = self.journal.failure
        message = reason or failure.get("message")
        self.journal.set_state(RunState.FAILED, message=message)
        self.journal.record("run_failed", process=failure.get("process"), message=message)
        code = failure.get("exit_code")
        keeps = (ExitCode.DATA, ExitCode.CONFIG, ExitCode.NO_CONTINUE, ExitCode.BAD_NODE)
        return ExitCode(code) if code in keeps else ExitCode.FAILED

    async def _requeue_without_bad_nodes(self, nodes: Nodes) -> ExitCode:
        """Requeue for other nodes, unless the previous attempt excluded the same ones without success."""
        is_hopeful = nodes.found_new_bad_nodes
        if not is_hopeful:
            self.journal.record("nodes_bad_again", nodes=sorted(nodes.excluded))
        saved = await self._saved()
        result = await self.handoff.requeue_without(nodes.excluded, saved, is_hopeful=is_hopeful)
        if result.is_automatic:
            return ExitCode.BAD_NODE
        await self.handoff.cancel_waiting()
        return self._fail()

    async def _requeue_whole_job(self) -> ExitCode:
        """Requeue all components of a heterogeneous job: the head's was lost, and SLURM restarted only that one."""
        self.journal.record("came_back_alone", host=self.journal.state["host"])
        excluded = self.nodes.excluded if self.nodes is not None else ()
        result = await self.handoff.requeue_without(excluded, await self._saved())
        if result.is_automatic:
            return ExitCode.PREEMPTED
        await self.handoff.cancel_waiting()
        return self._fail(f"the head node was lost and restarted without the other nodes; {result.reason}")

    # -- before the first process ------------------------------------------------------------------

    async def _change_split(self) -> dict[str, str]:
        """Apply ``layout.auto_split``, except after an attempt that failed: its rates may be those of a fault."""
        is_due = self.attempt > 1 and self.plan.phases[-1].recipe.layout.auto_split
        if not is_due or self.earlier.get("state") == RunState.FAILED:
            return {}
        split = await apply_advised_split(self.run_dir)
        if "sentence" in split:
            plan = await retry_run_directory(partial(load_plan, self.run_dir))
            self.plan = self.context.plan = with_interpreter(plan, sys.executable)
        return split

    async def _open_attempt(self) -> None:
        # first, because a failure during the cleanup is recorded in it
        state = self.journal.state = {
            "attempt": self.attempt,
            "state": RunState.STARTING.value,
            "phase": None,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job_id": os.environ.get("SLURM_JOB_ID") or os.environ.get("SUBMITIT_LOCAL_JOB_ID"),
            "started": round(time.time(), 3),
            "message": None,
            "processes": {},
            "slowest_save_s": self.earlier.get("slowest_save_s"),
        }
        await retry_run_directory(partial(clear_earlier_attempt, self.run_dir, self.attempt))
        await retry_run_directory(self.journal.reserve.make)
        self.journal.set_state(RunState.STARTING)
        modules = os.environ.get("LOADEDMODULES", "").replace(":", " ") or None
        facts = {"host": state["host"], "job": state["job_id"], "modules": modules, "code": code_name()}
        # with the time from which the budget of hours counts
        self.journal.record("attempt_started", attempt=self.attempt, time=state["started"], **facts)

    async def _read_allocation(self) -> None:
        if self.plan.scheduler != "slurm":
            self._complete_no_proxy([socket.gethostname()])
            return
        allocation = await arrange_by_switch(read_allocation(self.plan), self.plan)
        nodes = self.use_allocation(allocation)
        nodes.publish()
        await asyncio.to_thread(
            self._complete_no_proxy, nodes.allocation.in_order(nodes.allocation.all_hosts)
        )
        await self.clock.refresh()

    def _complete_no_proxy(self, hosts: list[str]) -> None:
        """Set ``no_proxy`` for all processes, if this job has an HTTP proxy."""
        configured = self.plan.no_proxy
        if no_proxy_variables(os.environ, configured, (), ()):
            os.environ.update(no_proxy_variables(os.environ, configured, hosts, addresses_of(hosts)))

    def use_allocation(self, allocation: Allocation) -> Nodes:
        self.nodes = Nodes(self.context, allocation, self.earlier.get("nodes") or {})
        self.clock.job_id = allocation.job_id
        self.clock.questions = QuestionFloor(self.run_dir.slurm_questions, self.plan.ask_every_s)
        return self.nodes

    async def _cancel_waiting_engines(self) -> None:
        """Cancel elastic engines that are still in the queue; running ones notice the end of the run themselves.

        Not after a failure, or a SIGTERM without a user's request: SLURM may requeue the job of a lost node, or a
        preempted job.
        """
        job = await retry_run_directory(
            lambda: read_json_or_none(self.run_dir.job) or {}, limit_s=IO_RETRY_LIMIT_S
        )
        engines = job.get("engines_job_id")
        ended = self.journal.state.get("state")
        may_be_requeued = signal.SIGTERM in self.stop.signals and not self.handoff.is_cancelled
        is_over = ended in (RunState.STOPPED, RunState.CANCELLED) and not may_be_requeued
        if engines is not None and (ended == RunState.DONE or is_over):
            await run_slurm(*cancel_command([engines], only_pending=True))

    # -- signals and the lock ----------------------------------------------------------------------

    def _on_warning(self) -> None:
        """Handle SLURM's walltime warning, sent ``signal_margin_s`` before the end, up to a minute early.

        No more time than that is left. The limit may have been shortened since the last question, and the warning may
        be a few seconds late, so SLURM is asked as well.
        """
        if self.nodes is None or self.plan.signal_margin_s is None or self.warning is not None:
            return
        self.clock.warn(self.plan.signal_margin_s)
        self.warning = asyncio.create_task(self._ask_after_warning())

    async def _ask_after_warning(self) -> None:
        await self.clock.refresh()
        if self.current is not None and not self.journal.is_closing:
            self.current.on_signal(signal.SIGUSR2)  # shortens the budget of a stop that has begun

    def _install_signal_handlers(self) -> None:
        """SIGUSR2: the walltime is near, save. SIGTERM: save if that is quick. A second SIGTERM or SIGINT: end now."""
        loop = asyncio.get_running_loop()
        for number in HANDLED:
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, lambda: None)  # the terminal was closed; the run continues

    def _on_signal(self, number: int) -> None:
        self.journal.record("signal", signal=signal.Signals(number).name)
        self.stop.signals.add(number)
        if self.journal.is_closing:
            return
        if number == signal.SIGUSR2:
            self._on_warning()
        if self.current is not None:
            self.current.on_signal(number)
        elif self.main is not None:
            if number == signal.SIGUSR2:
                self.stop.request(WALLTIME)
            self.main.cancel()

    async def _keep_lock_alive(self) -> None:
        assert self.main is not None
        while await in_daemon_thread(self.journal.is_owner):
            await asyncio.sleep(TOUCH_EVERY_S)
        self.main.cancel()


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    match arguments:
        case [run_dir]:
            fault = None
        case [run_dir, "--setup-failure", status, line, output]:
            fault = setup_fault(status, line, output)
        case _:
            options = "[--setup-failure STATUS LINE OUTPUT]"
            print(f"usage: python -m primerl_hpc.runtime.supervisor RUN_DIR {options}", file=sys.stderr)
            return ExitCode.USAGE
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    set_safe_umask()
    env.leave_open_folder()
    raise_limits()  # srun propagates them to every step
    try:
        supervisor = Supervisor(RunDir(Path(run_dir).resolve()), fault)
        code = asyncio.run(supervisor.run())
    except PrimerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return remove_bundle(code, supervisor.plan, supervisor.nodes and supervisor.nodes.allocation)


if __name__ == "__main__":
    sys.exit(main())
