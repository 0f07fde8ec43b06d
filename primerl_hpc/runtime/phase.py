"""One running phase: starts processes, waits for exits, requests and deadlines, applies the policy's decisions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import time
from collections.abc import Callable, Set
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from primerl_hpc.common.errors import ExitCode, SchedulerError, TimeoutWaitingError
from primerl_hpc.common.names import Kind, Role, RunState, process_name
from primerl_hpc.common.waiting import TransientIOErrors, in_daemon_thread
from primerl_hpc.plan.plan import OnExit, PhasePlan
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.runtime.context import RunContext
from primerl_hpc.runtime.files.journal import run_directory_errors
from primerl_hpc.runtime.job.nodes import Nodes
from primerl_hpc.runtime.job.requeue import WALLTIME
from primerl_hpc.runtime.job.walltime import RESERVE_S, WalltimeWatch
from primerl_hpc.runtime.phase_files import PhaseFiles, Seen
from primerl_hpc.runtime.policy import Action, PhasePolicy
from primerl_hpc.runtime.process_state import ProcessState, server_urls
from primerl_hpc.runtime.step import ExitStatus, Launch, PhaseEnd, Step
from primerl_hpc.runtime.steps.local import LocalStep, end_orphans
from primerl_hpc.runtime.steps.srun import SrunStep
from primerl_hpc.runtime.watchdog import HealthWatch, StallClock, suspect
from primerl_hpc.slurm.commands import UnansweredError

T = TypeVar("T")

logger = logging.getLogger(__name__)

POLL_S = 0.25
TERM_LIMIT_S = 20.0
"""A scheduler sends SIGKILL after its KillWait (30 s by default) from SIGTERM; a save must fit into this."""
STOP_LIMIT_S = 600.0
"""A requested stop that takes longer, and longer than step and save are known to take, ends without a save."""
HANG_CHECK_S = 1.0
"""Interval between checks for hangs, each of which reads files of the run directory."""
STACKS_S = 1.0
"""Time for a hung process to write its stacks before it is killed."""
ASK_AGAIN_S = 10.0
"""Interval between questions to a SLURM that does not answer whether a node is lost."""
TEARDOWN_S = 8.0
"""From the first SIGTERM of a teardown to SIGKILL; guards kill their process trees after 5 s themselves."""


class PhaseRun:
    def __init__(
        self,
        context: RunContext,
        phase: PhasePlan,
        nodes: Nodes | None = None,
        *,
        resumed_from: float = math.inf,
        inherited: Set[int] = frozenset(),
    ) -> None:
        """``nodes``: None outside SLURM. ``resumed_from``: the step after which the phase starts. ``inherited``: child
        processes of the supervisor that it did not start."""
        self.context, self.phase, self.nodes, self.inherited = context, phase, nodes, inherited
        self.run_dir, self.journal = context.run_dir, context.journal
        self.is_training = phase.recipe.kind in (Kind.RL, Kind.SFT)
        self.policy = PhasePolicy(phase)
        self.files = PhaseFiles(context, phase, resumed_from=resumed_from)
        self.processes = {process.name: ProcessState(process) for process in phase.processes}
        self.stop_deadline: float | None = None
        self.walltime = WalltimeWatch(context, phase, self.files.progress, read=self._read)
        self.stall = StallClock(phase.recipe.timeouts.stall_s, time.monotonic())
        tls = run_keys(self.run_dir, context.attempt).client_context()
        self.health = HealthWatch(lambda: server_urls(self.processes), phase.recipe.timeouts.health_s, tls)
        self.next_hang_check = 0.0
        self.progress_errors = TransientIOErrors("the run's progress")
        self.abort_immediately = False
        self.is_out_of_nodes = False
        self.recovery: tuple[dict[str, Any], float] | None = None
        """Fault and delay of a recovery whose lost steps still have to be deleted."""
        self.recovered: list[dict[str, Any]] = []
        """Faults of this phase that the run recovered from."""
        self.is_terminated = False
        """SIGTERM was received: SIGKILL follows within seconds, from the scheduler or from the caller."""

    async def run(self) -> PhaseEnd:
        health = asyncio.create_task(self.health.watch())
        try:
            return await self._watch()
        except SchedulerError as error:
            self.journal.write_own_failure("a process could not be started", str(error), error.exit_code)
            return PhaseEnd.FAILED
        finally:
            health.cancel()
            await self._end([process for process in self.processes.values() if process.waiter is not None])

    # -- starting ----------------------------------------------------------------------------------

    async def _start(self, process: ProcessState) -> None:
        plan, incarnation = process.plan, process.incarnation + 1
        process.launch = Launch(plan, self.run_dir, self.phase.name, self.context.attempt, incarnation)
        process.hosts = () if self.nodes is None else tuple(self.nodes.allocation.hosts_of(plan.nodes))
        # descendants of the earlier incarnation, if its guard was killed
        if incarnation and self.nodes is None:
            running = [other.step for other in self.processes.values() if other.waiter is not None]
            await end_orphans([step for step in running if isinstance(step, LocalStep)], self.inherited)
        process.step = self._make_step(process.launch)
        await self._read(partial(self.files.prepare, process, process.step, process.launch))
        await process.step.start()
        process.waiter, process.incarnation = asyncio.create_task(process.step.wait()), incarnation
        process.started_at, process.ready_at, process.restart_at = time.monotonic(), None, None
        process.verdict, process.has_reported, process.url = "", False, ""
        self.files.endpoints.hurry()
        self.health.forget(plan.name)
        details = {"incarnation": incarnation, "log": plan.log, "role": plan.role.value}
        self.journal.set_process(plan.name, state="starting", **details)
        self.journal.record("role_started", process=plan.name, incarnation=incarnation)

    def _make_step(self, launch: Launch) -> Step:
        if self.nodes is not None:
            return SrunStep(launch, self.nodes.allocation)
        return LocalStep(launch, has_gpus=self.context.plan.accelerator == "gpu")

    # -- watching ----------------------------------------------------------------------------------

    async def _watch(self) -> PhaseEnd:
        errors = run_directory_errors()
        while True:
            try:
                with errors:
                    if end := await self._poll():
                        return end
            except TimeoutWaitingError:  # from `_read`
                if not self.abort_immediately:
                    self.journal.record("stop_timed_out")
                logger.warning("The run directory does not respond; the run ends without waiting for it")
                return PhaseEnd.ABANDONED
            waiters = [process.waiter for process in self.processes.values() if process.waiter is not None]
            if running := [waiter for waiter in waiters if not waiter.done()]:
                await asyncio.wait(running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            else:  # all processes wait for a restart or for a decision about their exit
                await asyncio.sleep(POLL_S)

    async def _poll(self) -> PhaseEnd | None:
        """Handle exits, readiness, hangs, elastic engines and stop requests; return how the phase ended, if it did."""
        # exits first: what follows reads files, which may take long
        self._record_exits()
        for process in self.processes.values():
            is_due = process.ended is not None and time.monotonic() >= process.decide_at
            if is_due and (end := await self._on_exit(process)):
                return end
        if not self.journal.is_settled:
            # the endpoints of exited processes are deleted before their successors start
            await self._read(self.journal.catch_up)
        # before anything is started: all processes that could write steps have ended
        if self.recovery is not None:
            await self._drop_lost_steps(*self.recovery)
        is_stopping = self.stop_deadline is not None
        # one visit of a thread for all files: a slow filesystem costs one wait, not one for each process
        seen = await self._read(partial(self.files.look, self.processes, is_stopping=is_stopping))
        for process in self.processes.values():
            await self._check_process(process, seen)
        for name, change in seen.elastic:
            self.journal.set_process(name, role=Role.INFERENCE.value, **change)
            details = {"incarnation": change["incarnation"], "url": change["url"]}
            self.journal.record(f"engine_{change['state']}", process=name, **details)
        if time.monotonic() >= self.next_hang_check:
            self.next_hang_check = time.monotonic() + HANG_CHECK_S
            with self.progress_errors:  # an I/O error must not delay walltime and stop requests
                await self._check_hangs()
            if self.stop_deadline is None and (reason := await self.walltime.why_stop()):
                self._request_stop(reason)
        return self._check_stop(seen.stop)

    async def _read(self, call: Callable[[], T]) -> T:
        """Return the result of ``call``, a file operation, done in a thread. Signals and exits are handled meanwhile.

        Raises TimeoutWaitingError if it has not ended when the run must end.
        """
        return await in_daemon_thread(call, may_wait=self._may_wait, poll_s=POLL_S)

    def _may_wait(self) -> bool:
        self._record_exits()
        is_late = self.stop_deadline is not None and time.monotonic() > self.stop_deadline
        return not (self.abort_immediately or is_late)

    def _record_exits(self) -> None:
        for process in self.processes.values():
            if process.waiter is not None and process.waiter.done():
                self._record_exit(process, process.waiter.result())

    def _record_exit(self, process: ProcessState, status: ExitStatus) -> None:
        name, now = process.name, time.monotonic()
        process.waiter, process.ended, process.decide_at = None, status, now
        process.served_s = now - (process.ready_at or now)
        self.journal.forget_endpoints(name)
        self.journal.set_process(name, state="exited", exit=str(status))
        self.journal.record("role_exited", process=name, status=str(status))

    async def _on_exit(self, process: ProcessState) -> PhaseEnd | None:
        """Decide what the exit of a process means. If a read fails, nothing was changed and all of this is retried."""
        assert process.ended is not None
        name, status = process.name, process.ended
        # all reads first, because they may raise OSError; the writes below never do
        is_stopping = self.stop_deadline is not None
        found = await self._read(partial(self.files.describe_exit, process, status, is_stopping=is_stopping))
        fault, code = found.fault, found.end.code
        if status.signal is None:  # torchrun ends with 1 whatever its ranks reported
            self.journal.set_process(name, exit=f"exit code {int(code)}")
        is_reclaimed = self.is_terminated or found.stop_reason == "scheduler"
        # killed while the scheduler reclaims the nodes: it did not fail
        is_preempted = is_stopping and is_reclaimed and status.signal in (signal.SIGTERM, signal.SIGKILL)
        try:
            is_failed = code not in (ExitCode.DONE, ExitCode.STOPPED)
            is_lost = is_failed and await self._has_lost_its_node(process, status.unreachable)
        except UnansweredError:
            logger.warning("SLURM does not answer whether the node of %s is lost; asking again", name)
            process.decide_at = time.monotonic() + ASK_AGAIN_S
            return None
        process.ended = None
        # the phase cannot end well without this process, and there is no node to start it on: a requeue gets others
        if is_lost and self.is_out_of_nodes and process.ends_phase:
            return PhaseEnd.ABANDONED
        decision = self.policy.on_exit(name, replace(found.end, is_lost=is_lost))
        fault["reason"] = fault["reason"] or decision.reason
        if decision.action in (Action.FAIL, Action.RECOVER) and is_preempted:
            return PhaseEnd.ABANDONED
        is_fault = decision.action in (Action.FAIL, Action.RECOVER)
        # a full disk is the cause of most errors that follow from it, and a recovery would meet it again
        full = await self._read(self.journal.reserve.why_full) if is_fault else None
        match decision.action:
            case Action.RESTART if is_lost and self.is_out_of_nodes:
                pass  # the other processes save, then the run leaves the allocation
            case Action.RESTART:
                process.restart_at = time.monotonic() + decision.delay_s
                self.journal.record("role_restarting", process=name, in_s=decision.delay_s)
            case Action.PHASE_DONE:
                return PhaseEnd.DONE
            case Action.PHASE_STOPPED:
                return PhaseEnd.DONE if self.walltime.is_goal_reached else PhaseEnd.STOPPED
            # while the run stops, there is no time for a recovery: the next attempt starts at the same checkpoint
            case Action.RECOVER if self.stop_deadline is None and full is None:
                await self._recover(fault, decision.delay_s)
            case Action.FAIL | Action.RECOVER:
                if full is not None:  # then the log may lack the error
                    fault["message"] = f"{full} in the run directory ({fault['message']})"
                self.journal.write_failure(fault | {"recovered": self.recovered})
                return PhaseEnd.FAILED
            case Action.CONTINUE:
                if process.plan.on_exit == OnExit.OPTIONAL:
                    self.journal.give_up(name, str(status), fault["message"])
        return None

    async def _has_lost_its_node(self, process: ProcessState, unreachable: Set[str]) -> bool:
        """True if a host of this process is lost. Raises UnansweredError if SLURM does not answer.

        A spare replaces the host; without one, the run leaves the allocation.
        """
        nodes = self.nodes
        if nodes is None:
            return False
        lost = await nodes.find_lost(process.hosts, unreachable)
        if lost and not nodes.exclude(lost):
            host, reason = next(iter(lost.items()))
            why = "no spare node is left" if self.context.plan.spare_nodes else "the job has no spare nodes"
            message = f"{host} was lost, and {why}"
            nodes.write_shortage(host, reason, message, process=process.name, check="lost")
            self.is_out_of_nodes = True
            if self.stop_deadline is None:
                self.context.stop.request("scheduler")
        return any(host in nodes.excluded for host in process.hosts)

    async def _recover(self, fault: dict[str, Any], delay_s: float) -> None:
        """End all processes that can end the phase, drop steps after the last complete checkpoint, restart there.

        Engines may hold a policy of the dropped steps; the orchestrator resets them to the checkpoint's when it starts.
        """
        del fault["last_lines"]
        workers = [process for process in self.processes.values() if process.ends_phase]
        for worker in workers:
            worker.ended, worker.restart_at = None, time.monotonic() + delay_s
        self.recovery = fault, delay_s
        self.stall.restart(time.monotonic())
        await self._end([worker for worker in workers if worker.waiter is not None])

    async def _drop_lost_steps(self, fault: dict[str, Any], delay_s: float) -> None:
        fault["after_step"] = await self._read(self.files.drop_lost_steps)
        self.recovery = None
        self.recovered.append(fault)
        self.journal.record("recovery_started", **fault, in_s=delay_s)

    async def _check_process(self, process: ProcessState, seen: Seen) -> None:
        """Start it if it is due; check readiness, its deadline, and restart requests."""
        name, now = process.name, time.monotonic()
        if process.restart_at is not None and now >= process.restart_at:
            await self._start(process)
        if process.waiter is None or process.step is None:
            return
        endpoint = seen.endpoints.get(name) if process.is_report_expected else None
        if endpoint and endpoint.get("incarnation") == process.incarnation:
            process.note_report(endpoint, self.journal)
        limit_s = process.plan.ready_timeout_s
        if not process.is_ready and limit_s and now - process.started_at > limit_s and not process.verdict:
            process.verdict = f"{name} was not ready after {limit_s} s"
            self.journal.record("role_not_ready", process=name, after_s=limit_s)
            await process.step.kill()
        if name in seen.restarts:
            reason = seen.restarts[name].get("reason")
            self.journal.record("role_restart_requested", process=name, reason=reason)
            await process.step.terminate()

    async def _check_hangs(self) -> None:
        """Kill servers that do not respond, and a process that stalls the run; the policy decides about its exit."""
        for name in server_urls(self.processes):
            if self.processes[name].waiter is not None and self.health.is_hung(name):
                await self._end_hung(name, f"{name} did not respond for {self.health.limit_s} s")
        servers = [process for process in self.processes.values() if process.plan.ready_timeout_s]
        is_due = all(process.is_ready and process.waiter is not None for process in servers)
        is_due = is_due and self.stop_deadline is None and not self._is_recovering()
        if not self.is_training:
            return
        if not is_due:
            self.stall.restart(time.monotonic())
            return
        activity = await self._read(self.files.progress.activity)
        stalled_s = self.stall.seconds_stalled(time.monotonic(), activity, is_due=is_due)
        if stalled_s is None:
            return
        batch, step = await self._read(self.files.last_steps)
        names = list(self.processes)  # benchmark mode has only a trainer
        name = names[0] if len(names) == 1 else suspect(self.phase.recipe.kind, batch, step)
        evaluator = process_name(Role.EVALUATOR, 0)  # with kind sft it may still run after the trainer's end
        if self.processes[name].waiter is None and evaluator in self.processes:
            name = evaluator
        done = f"its last step was {step}" + (f", the last batch {batch}" if batch else "")
        self.stall.restart(time.monotonic())
        if self.processes[name].waiter is not None:
            await self._end_hung(name, f"{name} made no progress for {stalled_s:.0f} s: {done}")

    async def _end_hung(self, name: str, verdict: str) -> None:
        process = self.processes[name]
        assert process.step is not None
        process.verdict = verdict
        self.health.forget(name)
        self.journal.record("role_hung", process=name, message=verdict)
        await process.step.dump_stacks()
        await asyncio.sleep(STACKS_S)
        await process.step.kill()

    # -- requests and signals ----------------------------------------------------------------------

    def on_signal(self, number: int) -> None:
        if number == signal.SIGUSR2:
            self._request_stop(WALLTIME)
        elif self.is_terminated:
            self.abort_immediately = True
        else:
            self.is_terminated = True
            self._request_stop(signal.Signals(number).name, TERM_LIMIT_S)

    def _request_stop(self, reason: str, limit_s: float = math.inf) -> None:
        if self.stop_deadline is None:
            self.context.stop.request(reason)
        self._begin_stop(reason, limit_s)

    def _check_stop(self, request: dict[str, Any] | None) -> PhaseEnd | None:
        """``request``: control/stop, if it exists."""
        is_requested, request = request is not None, request or {}
        if is_requested and self.stop_deadline is None:
            limit_s = max(STOP_LIMIT_S, self.walltime.deadline.need_s)
            self._begin_stop(request.get("reason"), limit_s, saves=not request.get("now"))
        if self.abort_immediately or request.get("now"):
            return PhaseEnd.ABANDONED
        can_save = any(process.plan.role in (Role.TRAINER, Role.SFT) for process in self.processes.values())
        if self.stop_deadline is not None and not can_save:
            return PhaseEnd.STOPPED  # nothing to save: an evaluation, or inference only
        if self.stop_deadline is not None and self._is_recovering():
            return PhaseEnd.ABANDONED  # nothing new since the last save
        if self.stop_deadline is not None and time.monotonic() > self.stop_deadline:
            self.journal.record("stop_timed_out")
            return PhaseEnd.ABANDONED
        return None

    def _begin_stop(self, reason: str | None, limit_s: float, *, saves: bool = True) -> None:
        """Give the save ``limit_s``, but not the time that the end of the job needs."""
        limit_s = min(limit_s, max(TERM_LIMIT_S, self.context.clock.seconds_left() - RESERVE_S))
        limit_s = limit_s if math.isfinite(limit_s) else STOP_LIMIT_S
        deadline = time.monotonic() + limit_s
        if self.stop_deadline is not None:
            self.stop_deadline = min(self.stop_deadline, deadline)
            return
        self.stop_deadline = deadline
        self.journal.set_state(RunState.STOPPING)
        details = {"reason": reason, "saves": saves, "limit_s": round(limit_s), **self.walltime.as_details()}
        self.journal.record("stop_requested", **details)

    def _is_recovering(self) -> bool:
        workers = (process for process in self.processes.values() if process.ends_phase)
        return any(worker.restart_at is not None for worker in workers)

    # -- ending ------------------------------------------------------------------------------------

    async def _end(self, processes: list[ProcessState]) -> None:
        """Send SIGTERM to all of them at once, SIGKILL after `TEARDOWN_S`."""
        waiters = [process.waiter for process in processes if process.waiter is not None]
        if not waiters:
            return
        for process in processes:
            assert process.step is not None
            await process.step.terminate()
        _, late = await asyncio.wait(waiters, timeout=TEARDOWN_S)
        if late:
            for process in processes:
                if process.waiter in late and process.step is not None:
                    await process.step.kill()
            await asyncio.wait(late, timeout=TEARDOWN_S)
        for process in processes:
            self.journal.forget_endpoints(process.name)
            with contextlib.suppress(asyncio.InvalidStateError, OSError):
                status = process.waiter.result() if process.waiter else None
                self.journal.set_process(process.name, state="ended", exit=str(status))
            process.waiter = None
