"""One phase while it runs: starts its processes, waits for exits, requests and deadlines, acts on the policy's word."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from primerl_hpc.common.errors import ExitCode, SchedulerError
from primerl_hpc.common.files import is_there, read_json_or_none, write_json
from primerl_hpc.common.names import Role
from primerl_hpc.common.rundir import forget_endpoints, read_endpoint
from primerl_hpc.plan.types import PhasePlan, ProcessPlan
from primerl_hpc.runtime.elastic import ElasticEngines
from primerl_hpc.runtime.failures import describe_failure, forget_earlier_words, write_failure
from primerl_hpc.runtime.policy import Action, PhasePolicy
from primerl_hpc.runtime.steps import ExitStatus, Launch, Step

if TYPE_CHECKING:
    from primerl_hpc.runtime.supervisor import Supervisor

POLL_S = 0.25
TERM_BUDGET_S = 20.0
"""After SIGTERM a scheduler kills within its KillWait (30 s by default); a save must fit in this."""
STOP_BUDGET_S = 600.0
"""A requested stop that takes longer ends without a save."""
LAST_S = 30.0
"""Of the walltime, kept for the teardown and for going back into the queue."""
TEARDOWN_S = 8.0
"""From the first SIGTERM of a teardown to SIGKILL; guards kill their trees after 5 s themselves."""


class PhaseEnd(StrEnum):
    DONE = "done"
    STOPPED = "stopped"
    ABANDONED = "abandoned"  # ended on request before a save
    FAILED = "failed"


@dataclass
class Running:
    """One process of the phase in its present life."""

    process: ProcessPlan
    incarnation: int = 0
    step: Step | None = None
    waiter: asyncio.Task[ExitStatus] | None = None
    launch: Launch | None = None
    started_at: float = 0.0
    is_ready: bool = False
    restart_at: float | None = None
    exit: ExitStatus | None = field(default=None)


class PhaseRun:
    def __init__(self, supervisor: Supervisor, phase: PhasePlan) -> None:
        self.supervisor, self.phase = supervisor, phase
        self.run_dir = supervisor.run_dir
        self.policy = PhasePolicy(phase)
        self.running = {process.name: Running(process) for process in phase.processes}
        self.elastic = ElasticEngines(self.run_dir, [process.name for process in phase.elastic])
        self.stop_deadline: float | None = None
        self.is_now = False
        self.is_being_taken = False
        """SIGTERM came: the scheduler, or who ran us, ends everything in seconds."""

    async def run(self) -> PhaseEnd:
        try:
            for each in self.running.values():
                await self._start(each)
            return await self._watch()
        except SchedulerError as error:
            self._write_launch_failure(error)
            return PhaseEnd.FAILED
        finally:
            await self._teardown()

    # -- starting ------------------------------------------------------------------------------------------------

    async def _start(self, each: Running) -> None:
        process = each.process
        each.launch = Launch(
            process, self.run_dir, self.phase.name, self.supervisor.attempt, each.incarnation
        )
        forget_earlier_words(self.run_dir, process)
        each.step = self.supervisor.make_step(each.launch)
        await each.step.start()
        each.waiter = asyncio.create_task(each.step.wait())
        each.started_at, each.is_ready, each.exit, each.restart_at = time.monotonic(), False, None, None
        self.supervisor.set_process(
            process.name,
            state="starting",
            incarnation=each.incarnation,
            log=process.log,
            role=process.role.value,
        )
        self.supervisor.record("role_started", process=process.name, incarnation=each.incarnation)

    # -- watching ------------------------------------------------------------------------------------------------

    async def _watch(self) -> PhaseEnd:
        while True:
            waiters = [each.waiter for each in self.running.values() if each.waiter is not None]
            await asyncio.wait(waiters, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            for each in self.running.values():
                if each.waiter is not None and each.waiter.done() and (end := await self._on_exit(each)):
                    return end
            for each in self.running.values():
                await self._look_after(each)
            for name, change in self.elastic.changes():
                self.supervisor.set_process(name, role=Role.INFERENCE.value, **change)
                self.supervisor.record(
                    f"engine_{change['state']}",
                    process=name,
                    incarnation=change["incarnation"],
                    url=change["url"],
                )
            if end := self._look_at_requests():
                return end

    async def _on_exit(self, each: Running) -> PhaseEnd | None:
        assert each.waiter is not None and each.launch is not None
        status, each.waiter, each.exit = each.waiter.result(), None, each.waiter.result()
        name, code = each.process.name, self._effective_code(each.process, status)
        forget_endpoints(self.run_dir, name)
        self.supervisor.set_process(name, state="exited", exit=str(status))
        self.supervisor.record("role_exited", process=name, status=str(status))
        decision = self.policy.on_exit(name, code, progress=self.run_dir.progress())
        match decision.action:
            case Action.RESTART:
                each.restart_at = time.monotonic() + decision.delay_s
                self.supervisor.record("role_restarting", process=name, in_s=decision.delay_s)
            case Action.PHASE_DONE:
                return PhaseEnd.DONE
            case Action.PHASE_STOPPED:
                return PhaseEnd.STOPPED
            case Action.FAIL if self._was_taken_away(status):
                return PhaseEnd.ABANDONED
            case Action.FAIL:
                host = status.host or socket.gethostname()
                full = self.supervisor.reserve.why_full()
                failure = describe_failure(each.launch, status, decision.reason, host)
                if full is not None:  # what it said about that may not have found room
                    failure["message"] = f"{full} in the run directory ({failure['message']})"
                self.supervisor.write(lambda: write_failure(self.run_dir, failure), is_vital=True)
                return PhaseEnd.FAILED
            case Action.GO_ON:
                pass
        return None

    def _was_taken_away(self, status: ExitStatus) -> bool:
        """A process that dies by SIGTERM or SIGKILL while the scheduler takes the nodes back did not fail."""
        request = read_json_or_none(self.run_dir.stop_request) or {} if self.stop_deadline else {}
        is_taken = self.is_being_taken or request.get("reason") == "scheduler"
        return is_taken and status.signal in (signal.SIGTERM, signal.SIGKILL)

    def _effective_code(self, process: ProcessPlan, status: ExitStatus) -> int:
        """torchrun ends with 0 when its ranks stopped on request; they say so in their outcome file."""
        outcome = read_json_or_none(self.run_dir.outcome(process.name)) or {}
        if status.code == 0 and outcome.get("outcome") == "stopped":
            return ExitCode.STOPPED
        return status.code

    async def _look_after(self, each: Running) -> None:
        """Readiness, deadlines, restarts that are due or asked for."""
        name, now = each.process.name, time.monotonic()
        if each.restart_at is not None and now >= each.restart_at:
            each.incarnation += 1
            await self._start(each)
        if each.waiter is None or each.step is None:
            return
        endpoint = None if each.is_ready else read_endpoint(self.run_dir, name)
        if endpoint and endpoint.get("incarnation") == each.incarnation:
            each.is_ready = True
            self.supervisor.set_process(name, state="ready", url=endpoint.get("url"))
            after_s = round(now - each.started_at, 1)
            self.supervisor.record("role_ready", process=name, after_s=after_s, url=endpoint.get("url"))
        limit_s = each.process.ready_timeout_s
        if not each.is_ready and limit_s and now - each.started_at > limit_s:
            self.supervisor.record("role_not_ready", process=name, after_s=limit_s)
            await each.step.kill()
        request = self.run_dir.restart_request(name)
        if is_there(request):
            asked = read_json_or_none(request) or {}
            request.unlink(missing_ok=True)
            if asked.get("incarnation", each.incarnation) != each.incarnation:
                return  # it is about a life that has ended; its successor is none the worse for it
            self.supervisor.record("role_restart_requested", process=name, reason=asked.get("reason"))
            await each.step.terminate()

    # -- requests and signals ----------------------------------------------------------------------------------------

    def on_signal(self, number: int) -> None:
        if number == signal.SIGUSR2:
            budget_s = self.supervisor.seconds_left() - LAST_S
        elif self.is_being_taken:
            self.is_now = True
            return
        else:
            self.is_being_taken, budget_s = True, TERM_BUDGET_S
        if self.stop_deadline is None:
            request = {"reason": signal.Signals(number).name}
            self.supervisor.write(lambda: write_json(self.run_dir.stop_request, request), is_vital=True)
        self._begin_stop(max(TERM_BUDGET_S, min(budget_s, STOP_BUDGET_S)))

    def _look_at_requests(self) -> PhaseEnd | None:
        if self.stop_deadline is None and is_there(self.run_dir.stop_request):
            self._begin_stop(STOP_BUDGET_S)
        request = read_json_or_none(self.run_dir.stop_request) or {} if self.stop_deadline else {}
        if self.is_now or request.get("now"):
            return PhaseEnd.ABANDONED
        if self.stop_deadline is not None and not self._can_save():
            return PhaseEnd.STOPPED  # nothing to save: an evaluation, or inference alone
        if self.stop_deadline is not None and time.monotonic() > self.stop_deadline:
            self.supervisor.record("stop_timed_out")
            return PhaseEnd.ABANDONED
        return None

    def _begin_stop(self, budget_s: float) -> None:
        deadline = time.monotonic() + budget_s
        self.stop_deadline = deadline if self.stop_deadline is None else min(self.stop_deadline, deadline)
        self.supervisor.set_stopping()
        self.supervisor.record("stop_requested", budget_s=budget_s)

    def _can_save(self) -> bool:
        return any(each.process.role.value in ("trainer", "sft") for each in self.running.values())

    # -- ending ----------------------------------------------------------------------------------------------------

    async def _teardown(self) -> None:
        """End everything that still runs: SIGTERM to all at once, SIGKILL after `TEARDOWN_S`."""
        alive = [each for each in self.running.values() if each.waiter is not None]
        for each in alive:
            assert each.step is not None
            await each.step.terminate()
        waiters = [each.waiter for each in alive if each.waiter is not None]
        if waiters:
            _, late = await asyncio.wait(waiters, timeout=TEARDOWN_S)
            if late:
                for each in alive:
                    if each.waiter in late and each.step is not None:
                        await each.step.kill()
                await asyncio.wait(late, timeout=TEARDOWN_S)
        for each in alive:
            forget_endpoints(self.run_dir, each.process.name)
            with contextlib.suppress(asyncio.InvalidStateError):
                status = each.waiter.result() if each.waiter else None
                self.supervisor.set_process(each.process.name, state="ended", exit=str(status))
            each.waiter = None

    def _write_launch_failure(self, error: SchedulerError) -> None:
        failure: dict[str, Any] = {
            "time": round(time.time(), 3),
            "attempt": self.supervisor.attempt,
            "phase": self.phase.name,
            "role": "supervisor",
            "process": "supervisor",
            "node": socket.gethostname(),
            "rank": None,
            "exit_code": int(error.exit_code),
            "signal": None,
            "reason": "a process could not be started",
            "message": str(error),
            "log": "",
            "last_lines": [],
        }
        write_failure(self.run_dir, failure)
