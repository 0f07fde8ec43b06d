"""One phase while it runs: starts its processes, waits for exits, requests and deadlines, acts on the policy's word."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from primerl_hpc.common.errors import ExitCode, SchedulerError
from primerl_hpc.common.files import is_there, read_json_or_none, read_jsonl
from primerl_hpc.common.names import Kind, Role, RunState
from primerl_hpc.common.patience import Patience
from primerl_hpc.common.restart_requests import take_restart_request
from primerl_hpc.common.rundir import read_endpoint
from primerl_hpc.plan.types import OnExit, PhasePlan
from primerl_hpc.runtime.elastic import ElasticEngines
from primerl_hpc.runtime.failures import (
    describe_failure,
    effective_code,
    forget_earlier_words,
    log_sizes,
)
from primerl_hpc.runtime.journal import run_directory_patience
from primerl_hpc.runtime.local_step import LocalStep, end_orphans
from primerl_hpc.runtime.policy import Action, PhasePolicy
from primerl_hpc.runtime.requeue import WALLTIME
from primerl_hpc.runtime.running import Running
from primerl_hpc.runtime.steps import ExitStatus, Launch
from primerl_hpc.runtime.walltime import RESERVE_S, WalltimeWatch
from primerl_hpc.runtime.watchdog import HealthWatch, StallClock, suspect

if TYPE_CHECKING:
    from primerl_hpc.runtime.supervisor import Supervisor

logger = logging.getLogger(__name__)

POLL_S = 0.25
TERM_BUDGET_S = 20.0
"""After SIGTERM a scheduler kills within its KillWait (30 s by default); a save must fit in this."""
STOP_BUDGET_S = 600.0
"""A requested stop that takes longer, and longer than step and save are known to take, ends without a save."""
LOOK_EVERY_S = 1.0
"""Between two looks at what hangs, each some questions to a shared filesystem."""
STACKS_S = 1.0
"""For a hung process to write its stacks down before it is killed."""
ASK_AGAIN_S = 10.0
"""Between two questions to a SLURM that does not say whether a node is lost."""
TEARDOWN_S = 8.0
"""From the first SIGTERM of a teardown to SIGKILL; guards kill their trees after 5 s themselves."""


class PhaseEnd(StrEnum):
    DONE = "done"
    STOPPED = "stopped"
    ABANDONED = "abandoned"  # ended on request before a save
    FAILED = "failed"


class PhaseRun:
    def __init__(self, supervisor: Supervisor, phase: PhasePlan) -> None:
        self.supervisor, self.phase = supervisor, phase
        self.run_dir, self.journal = supervisor.run_dir, supervisor.journal
        self.is_training = phase.recipe.kind in (Kind.RL, Kind.SFT)
        self.policy = PhasePolicy(phase)
        self.running = {process.name: Running(process) for process in phase.processes}
        self.elastic = ElasticEngines(self.run_dir, [process.name for process in phase.elastic])
        self.stop_deadline: float | None = None
        self.walltime = WalltimeWatch(supervisor, phase)
        self.stall = StallClock(phase.recipe.timeouts.stall_s, time.monotonic())
        asked = (Role.INFERENCE, Role.PREFILL, Role.ROUTER, Role.TEACHER, Role.JUDGE)
        servers = [each.name for each in phase.processes if each.role in asked]
        self.health = HealthWatch(self.run_dir, servers, phase.recipe.timeouts.health_s)
        self.next_look = 0.0
        self.looking = Patience("the run's progress")
        self.is_now = False
        self.is_out_of_nodes = False
        self.recovery: tuple[dict[str, Any], float] | None = None
        """Fault and pause of a recovery before which the steps that are lost must still be forgotten."""
        self.recovered: list[dict[str, Any]] = []
        """Faults of this phase that the run recovered from."""
        self.is_being_taken = False
        """SIGTERM came: the scheduler, or who ran us, ends everything in seconds."""

    async def run(self) -> PhaseEnd:
        health = asyncio.create_task(self.health.watch())
        try:
            return await self._watch()
        except SchedulerError as error:
            self.journal.write_own_failure("a process could not be started", str(error), error.exit_code)
            return PhaseEnd.FAILED
        finally:
            health.cancel()
            await self._teardown()

    # -- starting ------------------------------------------------------------------------------------------------

    async def _start(self, each: Running) -> None:
        process, incarnation = each.process, each.incarnation + 1
        each.launch = Launch(process, self.run_dir, self.phase.name, self.supervisor.attempt, incarnation)
        forget_earlier_words(self.run_dir, process)
        each.written = log_sizes(each.launch) if incarnation else {}
        nodes = self.supervisor.nodes
        each.hosts = () if nodes is None else tuple(nodes.allocation.hosts_of(process.nodes))
        if incarnation and nodes is None:  # what is left of its earlier life, if the guard was killed
            living = [every.step for every in self.running.values() if every.waiter is not None]
            guarded = [step for step in living if isinstance(step, LocalStep)]
            await end_orphans(guarded, self.supervisor.inherited)
        each.step = self.supervisor.make_step(each.launch)
        await each.step.start()
        each.waiter, each.incarnation = asyncio.create_task(each.step.wait()), incarnation
        each.started_at, each.ready_at, each.restart_at = time.monotonic(), None, None
        each.verdict = ""
        self.health.forget(process.name)
        told = {"log": process.log, "role": process.role.value}
        self.journal.set_process(process.name, state="starting", incarnation=incarnation, **told)
        self.journal.record("role_started", process=process.name, incarnation=incarnation)

    # -- watching ------------------------------------------------------------------------------------------------

    async def _watch(self) -> PhaseEnd:
        patience = run_directory_patience()
        while True:
            with patience:
                if end := await self._look_around():
                    return end
            waiters = [each.waiter for each in self.running.values() if each.waiter is not None]
            if alive := [waiter for waiter in waiters if not waiter.done()]:
                await asyncio.wait(alive, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            else:  # all that there is recovers, or ended and is to be decided on
                await asyncio.sleep(POLL_S)

    async def _look_around(self) -> PhaseEnd | None:
        """Who ended, is ready, hangs, joins or leaves; what is asked for."""
        for each in self.running.values():
            if each.waiter is not None and each.waiter.done():
                self._note_end(each, each.waiter.result())
            is_due = each.ended is not None and time.monotonic() >= each.decide_at
            if is_due and (end := await self._on_exit(each)):
                return end
        self.journal.catch_up()  # before a successor starts, what its forerunner left is gone
        if self.recovery is not None:
            await self._forget_what_is_lost(*self.recovery)
        for each in self.running.values():
            await self._look_after(each)
        for name, change in self.elastic.changes():
            self.journal.set_process(name, role=Role.INFERENCE.value, **change)
            told = {"incarnation": change["incarnation"], "url": change["url"]}
            self.journal.record(f"engine_{change['state']}", process=name, **told)
        if time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + LOOK_EVERY_S
            with self.looking:  # neither the walltime nor requests wait until it succeeds
                await self._look_at_progress()
            if self.stop_deadline is None and await self.walltime.is_due():
                self._ask_to_stop(WALLTIME)
        return self._look_at_requests()

    def _note_end(self, each: Running, status: ExitStatus) -> None:
        name, now = each.process.name, time.monotonic()
        each.waiter, each.ended, each.decide_at = None, status, now
        each.served_s = now - (each.ready_at or now)
        self.supervisor.forget_endpoints(name)
        self.journal.set_process(name, state="exited", exit=str(status))
        self.journal.record("role_exited", process=name, status=str(status))

    async def _on_exit(self, each: Running) -> PhaseEnd | None:
        """Decide what the end of a process means. Until it is decided, all this is tried again."""
        assert each.ended is not None
        name, status = each.process.name, each.ended
        # reads come before anything is changed, for they may fail; writes do not, they may be late
        code = effective_code(self.run_dir, each.process, status)
        progress, step, fault = self._progress(), self._last_step(), self._describe(each, status)
        was_taken_away = self._was_taken_away(status)
        is_lost = code != ExitCode.DONE and await self._has_lost_its_node(each)
        if is_lost is None:
            logger.warning("SLURM does not say whether the node of %s lives; asking again", name)
            each.decide_at = time.monotonic() + ASK_AGAIN_S
            return None
        each.ended = None
        if is_lost and self.is_out_of_nodes and each.process.on_exit == OnExit.ENDS_PHASE:
            return PhaseEnd.ABANDONED
        decision = self.policy.on_exit(
            name, code, progress=progress, step=step, is_lost=is_lost, served_s=each.served_s
        )
        fault["reason"] = fault["reason"] or decision.reason
        if decision.action in (Action.FAIL, Action.RECOVER) and was_taken_away:
            return PhaseEnd.ABANDONED
        match decision.action:
            case Action.RESTART if is_lost and self.is_out_of_nodes:
                pass  # the others save, then the run leaves
            case Action.RESTART:
                each.restart_at = time.monotonic() + decision.delay_s
                self.journal.record("role_restarting", process=name, in_s=decision.delay_s)
            case Action.PHASE_DONE:
                return PhaseEnd.DONE
            case Action.PHASE_STOPPED:
                return PhaseEnd.STOPPED
            case Action.RECOVER if self.stop_deadline is None and self.journal.reserve.why_full() is None:
                await self._recover(fault, decision.delay_s)
            case Action.FAIL | Action.RECOVER:
                full = self.journal.reserve.why_full()
                if full is not None:  # what it said about that may not have found room
                    fault["message"] = f"{full} in the run directory ({fault['message']})"
                self.journal.write_failure(fault | {"recovered": self.recovered})
                return PhaseEnd.FAILED
            case Action.GO_ON:
                pass
        return None

    async def _has_lost_its_node(self, each: Running) -> bool | None:
        """Whether a host of this process is gone; None when SLURM does not say.

        What was on it moves to a spare, or the run leaves the allocation.
        """
        nodes = self.supervisor.nodes
        if nodes is None or not self.supervisor.plan.spare_nodes:
            return False  # without spares the job is not to live on without a node: SLURM ends it
        if (lost := await nodes.find_lost(each.hosts)) is None:
            return None
        if lost and not nodes.exclude(lost):
            host = next(iter(lost))
            message = f"{host} was lost, and there is no spare node left"
            nodes.write_shortage(host, lost[host], message, process=each.process.name, check="lost")
            self.is_out_of_nodes = True
            if self.stop_deadline is None:
                self.supervisor.request_stop("scheduler")
        return any(host in nodes.excluded for host in each.hosts)

    def _describe(self, each: Running, status: ExitStatus) -> dict[str, Any]:
        """The fault that this end may turn out to be; its reason is ours where we ended the process."""
        assert each.launch is not None
        host = status.host or socket.gethostname()
        failure = describe_failure(each.launch, status, "", host, each.written)
        ours = {"reason": "it hung", "message": each.verdict, "was_ended_by_us": True}
        return failure | (ours if each.verdict else {})

    async def _recover(self, fault: dict[str, Any], delay_s: float) -> None:
        """End all that can end the phase, forget the steps after the last complete checkpoint, start them there again.

        Engines may hold a policy of those steps; the orchestrator brings them back to the checkpoint's when it starts.
        """
        del fault["last_lines"]
        workers = [every for every in self.running.values() if every.process.on_exit == OnExit.ENDS_PHASE]
        for every in workers:
            every.ended, every.restart_at = None, time.monotonic() + delay_s
        self.recovery = fault, delay_s
        self.stall.restart(time.monotonic())
        await self._end([every for every in workers if every.waiter is not None])

    async def _forget_what_is_lost(self, fault: dict[str, Any], delay_s: float) -> None:
        # off the loop: a shared filesystem may take long to delete, and the lock must be kept alive
        fault["after_step"] = await asyncio.to_thread(self.supervisor.prepare_phase, self.phase)
        self.recovery = None
        self.recovered.append(fault)
        self.journal.record("recovery_started", **fault, in_s=delay_s)

    def _was_taken_away(self, status: ExitStatus) -> bool:
        """A process that dies by SIGTERM or SIGKILL while the scheduler takes the nodes back did not fail."""
        request = read_json_or_none(self.run_dir.stop_request) or {} if self.stop_deadline else {}
        is_taken = self.is_being_taken or request.get("reason") == "scheduler"
        return is_taken and status.signal in (signal.SIGTERM, signal.SIGKILL)

    async def _look_after(self, each: Running) -> None:
        """Readiness, deadlines, restarts that are due or asked for."""
        name, now = each.process.name, time.monotonic()
        if each.restart_at is not None and now >= each.restart_at:
            await self._start(each)
        if each.waiter is None or each.step is None:
            return
        endpoint = None if each.is_ready else read_endpoint(self.run_dir, name)
        if endpoint and endpoint.get("incarnation") == each.incarnation:
            each.ready_at = now
            self.journal.set_process(name, state="ready", url=endpoint.get("url"))
            after_s = round(now - each.started_at, 1)
            self.journal.record("role_ready", process=name, after_s=after_s, url=endpoint.get("url"))
        limit_s = each.process.ready_timeout_s
        if not each.is_ready and limit_s and now - each.started_at > limit_s and not each.verdict:
            each.verdict = f"{name} was not ready after {limit_s} s"
            self.journal.record("role_not_ready", process=name, after_s=limit_s)
            await each.step.kill()
        if (asked := take_restart_request(self.run_dir, name, each.incarnation)) is not None:
            self.journal.record("role_restart_requested", process=name, reason=asked.get("reason"))
            await each.step.terminate()

    async def _look_at_progress(self) -> None:
        """End what hangs: a server that answers nobody, or who holds a silent run up. The policy takes it from there."""
        for name in self.health.processes:
            if self.running[name].waiter is not None and self.health.is_hung(name):
                verdict = f"{name} answered nobody for {self.health.limit_s} s"
                await self._end_hung(self.running[name], verdict)
        working = [each for each in self.running.values() if each.process.ready_timeout_s]
        is_due = all(each.is_ready and each.waiter is not None for each in working)
        is_due = is_due and self.stop_deadline is None and not self._is_recovering()
        if not self.is_training:
            return
        if (silent_s := self.stall.look(time.monotonic(), self._signs_of_life(), is_due=is_due)) is None:
            return
        batch, step = self._last_step("orchestrator"), self._last_step()
        names = list(self.running)  # benchmark mode has a trainer alone
        name = names[0] if len(names) == 1 else suspect(self.phase.recipe.kind, batch, step)
        done = f"its last step was {step}" + (f", the last batch {batch}" if batch else "")
        self.stall.restart(time.monotonic())
        if self.running[name].waiter is not None:
            await self._end_hung(self.running[name], f"{name} made no progress for {silent_s:.0f} s: {done}")

    async def _end_hung(self, each: Running, verdict: str) -> None:
        assert each.step is not None
        each.verdict = verdict
        self.health.forget(each.process.name)
        self.journal.record("role_hung", process=each.process.name, message=verdict)
        await each.step.dump_stacks()
        await asyncio.sleep(STACKS_S)
        await each.step.kill()

    def _signs_of_life(self) -> int:
        """Changes with every step and every finished rollout."""
        traces = [self.run_dir.phase(self.phase.name).traces(split) for split in ("train", "eval")]
        return self.run_dir.progress() + sum(path.stat().st_size for path in traces if path.exists())

    def _progress(self) -> int:
        """Grows with finished steps; where nothing is trained, with finished rollouts too."""
        return self.run_dir.progress() if self.is_training else self._signs_of_life()

    def _last_step(self, role: str | None = None) -> int:
        """The highest step that any life of a role finished in this attempt; default: the phase's trainer."""
        rows = read_jsonl(
            self.run_dir.metrics(role or ("sft" if self.phase.recipe.kind == Kind.SFT else "trainer"))
        )
        return max((row["step"] for row in rows if row.get("attempt") == self.supervisor.attempt), default=0)

    # -- requests and signals ----------------------------------------------------------------------------------------

    def on_signal(self, number: int) -> None:
        if number == signal.SIGUSR2:
            self._ask_to_stop(WALLTIME)
        elif self.is_being_taken:
            self.is_now = True
        else:
            self.is_being_taken = True
            self._ask_to_stop(signal.Signals(number).name, TERM_BUDGET_S)

    def _ask_to_stop(self, reason: str, budget_s: float = math.inf) -> None:
        if self.stop_deadline is None:
            self.supervisor.request_stop(reason)
        self._begin_stop(reason, budget_s)

    def _look_at_requests(self) -> PhaseEnd | None:
        is_new = self.stop_deadline is None and is_there(self.run_dir.stop_request)
        request = read_json_or_none(self.run_dir.stop_request) or {} if is_new or self.stop_deadline else {}
        if is_new:
            self._begin_stop(request.get("reason"), max(STOP_BUDGET_S, self.walltime.deadline.need_s))
        if self.is_now or request.get("now"):
            return PhaseEnd.ABANDONED
        if self.stop_deadline is not None and not self._can_save():
            return PhaseEnd.STOPPED  # nothing to save: an evaluation, or inference alone
        if self.stop_deadline is not None and self._is_recovering():
            return PhaseEnd.ABANDONED  # nothing new since the last save
        if self.stop_deadline is not None and time.monotonic() > self.stop_deadline:
            self.journal.record("stop_timed_out")
            return PhaseEnd.ABANDONED
        return None

    def _begin_stop(self, reason: str | None, budget_s: float) -> None:
        """Give the save so much time, but none that the end of the job needs."""
        budget_s = min(budget_s, max(TERM_BUDGET_S, self.supervisor.seconds_left() - RESERVE_S))
        budget_s = budget_s if math.isfinite(budget_s) else STOP_BUDGET_S
        deadline = time.monotonic() + budget_s
        if self.stop_deadline is not None:
            self.stop_deadline = min(self.stop_deadline, deadline)
            return
        self.stop_deadline = deadline
        self.journal.set_state(RunState.STOPPING)
        told = {"reason": reason, "budget_s": round(budget_s), **self.walltime.words()}
        self.journal.record("stop_requested", **told)

    def _is_recovering(self) -> bool:
        return any(
            each.restart_at is not None and each.process.on_exit == OnExit.ENDS_PHASE
            for each in self.running.values()
        )

    def _can_save(self) -> bool:
        return any(each.process.role.value in ("trainer", "sft") for each in self.running.values())

    # -- ending ----------------------------------------------------------------------------------------------------

    async def _teardown(self) -> None:
        await self._end([each for each in self.running.values() if each.waiter is not None])

    async def _end(self, alive: list[Running]) -> None:
        """End these: SIGTERM to all at once, SIGKILL after `TEARDOWN_S`."""
        waiters = [each.waiter for each in alive if each.waiter is not None]
        if not waiters:
            return
        for each in alive:
            assert each.step is not None
            await each.step.terminate()
        _, late = await asyncio.wait(waiters, timeout=TEARDOWN_S)
        if late:
            for each in alive:
                if each.waiter in late and each.step is not None:
                    await each.step.kill()
            await asyncio.wait(late, timeout=TEARDOWN_S)
        for each in alive:
            self.supervisor.forget_endpoints(each.process.name)
            with contextlib.suppress(asyncio.InvalidStateError, OSError):
                status = each.waiter.result() if each.waiter else None
                self.journal.set_process(each.process.name, state="ended", exit=str(status))
            each.waiter = None
