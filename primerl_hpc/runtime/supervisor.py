"""The supervisor: the batch process of a run. Starts every role, watches, restarts, tells the first fault, ends it all.

    python -m primerl_hpc.runtime.supervisor RUN_DIR

The story of one attempt: take the lock, find where to go on, then for each phase of the plan start its processes and
wait for exits, requests and signals until the policy says how the phase ended. Its exit code is the job's
(`ExitCode`). It is the only writer of control/state.json, events.jsonl and failure.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import ExitCode, OccupiedError, PrimerlError
from primerl_hpc.common.events import record_event
from primerl_hpc.common.files import is_there, read_json_or_none, write_json, write_text
from primerl_hpc.common.lock import TOUCH_EVERY_S, SupervisorLock
from primerl_hpc.common.log import setup_logging
from primerl_hpc.common.names import Kind, RunState
from primerl_hpc.common.rundir import STABLE, RunDir, ensure_api_key, forget_endpoints
from primerl_hpc.plan.types import PhasePlan, Plan, load_plan
from primerl_hpc.runtime.allocation import came_together, read_allocation, run_slurm, seconds_left
from primerl_hpc.runtime.failures import supervisor_failure, write_failure
from primerl_hpc.runtime.guard import PR_SET_CHILD_SUBREAPER, end_descendants, prctl
from primerl_hpc.runtime.local_step import LocalStep
from primerl_hpc.runtime.nodes import Nodes
from primerl_hpc.runtime.phase import PhaseEnd, PhaseRun
from primerl_hpc.runtime.requeue import CANCEL, WALLTIME
from primerl_hpc.runtime.reserve import FULL, Reserve
from primerl_hpc.runtime.srun_step import SrunStep
from primerl_hpc.runtime.steps import Launch, Step
from primerl_hpc.runtime.succession import Succession

HANDLED = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)

log = setup_logging("supervisor")


class Supervisor:
    def __init__(self, run: RunDir) -> None:
        self.run_dir = run
        self.plan: Plan = load_plan(run)
        self.lock = SupervisorLock(run.supervisor_lock)
        self.reserve = Reserve(run.reserve)
        earlier = read_json_or_none(run.state) or {}
        self.attempt = int(earlier.get("attempt", 0)) + 1
        self.state: dict[str, Any] = {}
        self.current: PhaseRun | None = None
        self.nodes: Nodes | None = None
        self.nodes_before: dict[str, Any] = earlier.get("nodes") or {}
        self.succession = Succession(self)
        self.ends_at = math.inf  # on the monotonic clock: when the walltime is over
        self.slowest_save_s: float | None = earlier.get("slowest_save_s")
        self.resumed_from = 0
        self.has_finished_a_phase = False
        self.signals: set[int] = set()
        self.is_closing = False
        self.is_taken_over = False
        """The lock is another supervisor's: the run directory is no longer ours to write."""
        self.main: asyncio.Task[Any] | None = None

    # -- one attempt ---------------------------------------------------------------------------------------------

    async def run(self) -> ExitCode:
        self.lock.acquire()
        self.main = asyncio.current_task()
        heartbeat = asyncio.create_task(self._keep_lock_alive())
        try:
            if (code := await self.succession.begin()) is not None:
                return code
            self._install_signal_handlers()
            self._open_attempt()
            if is_there(self.run_dir.stop_request):
                return await self._end_before_start()
            await self._read_allocation()
            if self.nodes is not None and not await came_together(self.nodes.allocation):
                self.is_closing = True
                return await self._come_back_whole()
            if self.nodes is not None and not await self.nodes.look():
                self.is_closing = True
                return await self._give_nodes_back(self.nodes)
            return await self._run_phases()
        except asyncio.CancelledError:
            if not self.is_taken_over:  # a signal before the first phase
                return await self._end_before_start()
            raise OccupiedError(
                "another supervisor took this run directory over", place=str(self.run_dir.root)
            ) from None
        except PrimerlError:
            raise
        except Exception as error:
            if not self.state:
                raise
            return await self._fail_by_ourselves(error)
        finally:
            await self._drop_waiting_engines()
            heartbeat.cancel()
            end_descendants(grace_s=0.0)  # orphans whose guard was killed came to us: we are their subreaper
            if not self.is_taken_over:
                self.reserve.release()
            self.lock.release()
            # one that comes now finds a loop that is being closed; how we end is decided
            signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)

    async def _run_phases(self) -> ExitCode:
        for phase in self.plan.phases:
            if is_phase_done(self.run_dir.phase(phase.name), phase):
                continue
            resumed = self.resumed_from = self.prepare_phase(phase)
            self.state.setdefault("began", {"phase": phase.name, "step": resumed})
            self.set_state(RunState.RUNNING, phase=phase.name, resumed_from=resumed)
            self.record("phase_started", phase=phase.name, kind=phase.recipe.kind.value, resumed_from=resumed)
            self.current = PhaseRun(self, phase)
            end = await self.current.run()
            if end != PhaseEnd.DONE:
                self.is_closing = True
                return await self._close(end, self.run_dir.phase(phase.name).latest_checkpoint() or 0)
            self.has_finished_a_phase = True
            self.record("phase_done", phase=phase.name)
        await self.succession.end()
        self.set_state(RunState.DONE)
        self.record("run_done")
        return ExitCode.DONE

    async def _end_before_start(self) -> ExitCode:
        """People, or the scheduler, want the end before anything has begun."""
        self.is_closing = True
        return await self._close(PhaseEnd.ABANDONED, (self.begins() or {"step": 0})["step"])

    async def _fail_by_ourselves(self, error: Exception) -> ExitCode:
        """What nobody foresaw is told like any other fault."""
        log.exception("the supervisor failed")
        self.is_closing = True
        told = f"{type(error).__name__}: {error}"
        self.write_own_failure("the supervisor failed", told, ExitCode.FAILED)
        return await self._close(PhaseEnd.FAILED, (self.begins() or {"step": 0})["step"])

    async def _close(self, end: PhaseEnd, saved: int) -> ExitCode:
        reason = await self.succession.hand_over(end, saved) if self.nodes is not None else ""
        if reason is None:
            codes = {PhaseEnd.STOPPED: ExitCode.STOPPED, PhaseEnd.ABANDONED: ExitCode.PREEMPTED}
            return codes.get(end, ExitCode.FAILED)
        await self.succession.end()
        self.run_dir.stop_request.unlink(missing_ok=True)  # served
        self.state["message"] = reason or None
        if end == PhaseEnd.ABANDONED and self.current is not None and self.current.is_out_of_nodes:
            return self._fail(reason)
        if end == PhaseEnd.ABANDONED and not reason:  # people asked for it
            self.set_state(RunState.CANCELLED)
            self.record("run_cancelled")
            return ExitCode.PREEMPTED
        if end in (PhaseEnd.STOPPED, PhaseEnd.ABANDONED):
            self.set_state(RunState.STOPPED)
            self.record("run_stopped")
            return ExitCode.STOPPED if end == PhaseEnd.STOPPED else ExitCode.PREEMPTED
        return self._fail(reason)

    def _fail(self, reason: str = "") -> ExitCode:
        failure = read_json_or_none(self.run_dir.failure) or {}
        message = reason or failure.get("message")
        self.set_state(RunState.FAILED, message=message)
        self.record("run_failed", process=failure.get("process"), message=message)
        code = failure.get("exit_code")
        keeps = (ExitCode.DATA, ExitCode.CONFIG, ExitCode.NO_CONTINUE, ExitCode.BAD_NODE)
        return ExitCode(code) if code in keeps else ExitCode.FAILED

    async def _give_nodes_back(self, nodes: Nodes) -> ExitCode:
        """Too few good nodes: back into the queue without the bad ones, unless the last attempt tried just that."""
        if nodes.has_news:
            saved = (self.begins() or {"step": 0})["step"]
            if await self.succession.go_back_into_the_queue(saved) is None:
                return ExitCode.BAD_NODE
        else:
            self.record("nodes_bad_again", nodes=sorted(nodes.excluded))
        await self.succession.end()
        return self._fail()

    async def _come_back_whole(self) -> ExitCode:
        """This component of a heterogeneous job was lost and came back alone: the whole job goes into the queue again."""
        self.record("came_back_alone", host=self.state["host"])
        reason = await self.succession.go_back_into_the_queue((self.begins() or {"step": 0})["step"])
        if reason is None:
            return ExitCode.PREEMPTED
        await self.succession.end()
        return self._fail(f"the head was lost and came back alone; {reason}")

    # -- before the first process ----------------------------------------------------------------------------------

    def _open_attempt(self) -> None:
        run = self.run_dir
        logs = run.attempt_logs(self.attempt)
        logs.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            run.latest_logs.unlink()
        run.latest_logs.symlink_to(logs.name)
        run.failure.unlink(missing_ok=True)
        if (read_json_or_none(run.stop_request) or {}).get(
            "reason"
        ) != CANCEL:  # that one nobody has served yet
            run.stop_request.unlink(missing_ok=True)
        for left in (run.checkpoint_request, run.full_weights_request, run.live_version):
            left.unlink(missing_ok=True)  # of an earlier life
        for stale in ("endpoints", "errors", "outcomes", "restart_requests", "broadcast"):
            shutil.rmtree(run.control / stale, ignore_errors=True)
        ensure_api_key(run)
        self.reserve.make()
        self.state = {
            "attempt": self.attempt,
            "state": RunState.STARTING.value,
            "phase": None,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job_id": os.environ.get("SLURM_JOB_ID") or os.environ.get("SUBMITIT_LOCAL_JOB_ID"),
            "started": round(time.time(), 3),
            "message": None,
            "processes": {},
        }
        self.set_state(RunState.STARTING)
        self.record(
            "attempt_started", attempt=self.attempt, host=self.state["host"], job=self.state["job_id"]
        )

    def begins(self) -> dict[str, Any] | None:
        """Phase and step at which an attempt would begin now; None when every phase is done."""
        for phase in self.plan.phases:
            run = self.run_dir.phase(phase.name)
            if not is_phase_done(run, phase):
                return {"phase": phase.name, "step": run.latest_checkpoint() or 0}
        return None

    def prepare_phase(self, phase: PhasePlan) -> int:
        """Drop what an earlier life wrote beyond its last complete checkpoint; returns that step, 0 for none."""
        run = self.run_dir.phase(phase.name)
        step = run.latest_checkpoint() or 0
        if phase.recipe.kind in (Kind.RL, Kind.SFT):
            run.delete_after(step)
        return step

    # -- services for the phase --------------------------------------------------------------------------------------

    def make_step(self, launch: Launch) -> Step:
        return LocalStep(launch) if self.nodes is None else SrunStep(launch, self.nodes.allocation)

    async def _read_allocation(self) -> None:
        if self.plan.scheduler != "slurm":
            return
        allocation = read_allocation(self.plan)
        self.nodes = Nodes(self, allocation, self.nodes_before)
        self.set_nodes(allocation.hosts, self.nodes.as_state())
        await self.look_at_walltime()

    async def _drop_waiting_engines(self) -> None:
        """Engines that run see the end of the run themselves; those still in the queue would start for nothing.

        Not after a failure: SLURM may put the job of a lost node back into the queue.
        """
        engines = (read_json_or_none(self.run_dir.job) or {}).get("engines_job_id")
        if engines is not None and self.state.get("state") in (
            RunState.DONE,
            RunState.STOPPED,
            RunState.CANCELLED,
        ):
            await run_slurm("scancel", "--state=PENDING", engines)

    async def look_at_walltime(self) -> None:
        """Read when the job ends; it may have been given more time since the last look."""
        assert self.nodes is not None
        if (left := await seconds_left(self.nodes.allocation.job_id)) is not None:
            self.ends_at = time.monotonic() + left
            self.set_state(RunState(self.state["state"]), ends_at=round(time.time() + left))

    def seconds_left(self) -> float:
        """Until the walltime; infinite without one."""
        return self.ends_at - time.monotonic()

    def set_process(self, name: str, **values: Any) -> None:
        self.state["processes"].setdefault(name, {}).update(values)
        self.set_state(RunState(self.state["state"]))

    def set_nodes(self, hosts: Sequence[str], nodes: dict[str, Any]) -> None:
        """``hosts`` by node index of the plan; ``nodes``: what `Nodes` wants to know in the next attempt."""
        write_text(self.run_dir.attempt_hosts(self.attempt), "\n".join(hosts) + "\n")
        self.set_state(RunState(self.state["state"]), hosts=list(hosts), nodes=nodes)

    def set_state(self, state: RunState, **values: Any) -> None:
        self.state.update(state=state.value, updated=round(time.time(), 3), **values)
        self.state["slowest_save_s"] = self.slowest_save_s
        self.write(lambda: write_json(self.run_dir.state, self.state))

    def write(self, write: Callable[[], object], *, is_vital: bool = False) -> None:
        """On a full disk only last words and what is vital are written, with the reserve's space; the rest is dropped.

        The run then ends by the fault of the role that needs the space, not by ours.
        """
        if self.is_taken_over:
            return
        try:
            write()
        except OSError as error:
            if error.errno not in FULL:
                raise
            if is_vital or self.is_closing:
                self.reserve.spend()
                with contextlib.suppress(OSError):
                    write()

    def write_own_failure(self, reason: str, message: str, code: ExitCode) -> None:
        failure = supervisor_failure(
            attempt=self.attempt,
            phase=self.state.get("phase"),
            process="supervisor",
            node=socket.gethostname(),
            exit_code=code,
            reason=reason,
            message=message,
        )
        self.write(lambda: write_failure(self.run_dir, failure), is_vital=True)

    def forget_endpoints(self, process: str) -> None:
        """Of a process of ours that has ended; a successor of this supervisor has processes of the same names."""
        if self._is_owner():
            forget_endpoints(self.run_dir, process)

    def set_stopping(self) -> None:
        self.set_state(RunState.STOPPING)

    def record(self, event: str, **details: Any) -> None:
        self.write(lambda: record_event(self.run_dir, event, **details))
        log.info(
            "%s %s", event, " ".join(f"{key}={value}" for key, value in details.items() if value is not None)
        )

    # -- signals, heartbeat, strays -------------------------------------------------------------------------------------

    def _install_signal_handlers(self) -> None:
        """USR2: the walltime is near, save. TERM: save if it can be quick. A second TERM or INT: end now."""
        loop = asyncio.get_running_loop()
        for number in HANDLED:
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, lambda: None)  # the terminal went away; the run stays

    def _on_signal(self, number: int) -> None:
        self.record("signal", signal=signal.Signals(number).name)
        self.signals.add(number)
        if self.is_closing:
            return
        if self.current is not None:
            self.current.on_signal(number)
        elif self.main is not None:
            if number == signal.SIGUSR2:
                self.write(lambda: write_json(self.run_dir.stop_request, {"reason": WALLTIME}), is_vital=True)
            self.main.cancel()

    async def _keep_lock_alive(self) -> None:
        assert self.main is not None
        while self._is_owner():
            await asyncio.sleep(TOUCH_EVERY_S)
        self.main.cancel()

    def _is_owner(self) -> bool:
        """Says that we live, and finds out whether the run directory is still ours."""
        if not self.is_taken_over:
            with contextlib.suppress(OSError):  # a filesystem that falters says nothing of the lock
                self.is_taken_over = not self.lock.touch()
        return not self.is_taken_over


def is_phase_done(run: RunDir, phase: PhasePlan) -> bool:
    """A training phase is over when its last weights are stable and, where one is due, its last checkpoint whole."""
    recipe = phase.recipe
    if recipe.kind not in (Kind.RL, Kind.SFT):
        return False
    has_weights = (run.weights_step(recipe.steps) / STABLE).exists()
    if recipe.kind == Kind.RL or recipe.checkpoint.at_end:
        return has_weights and (not recipe.checkpoint.at_end or run.latest_checkpoint() == recipe.steps)
    return has_weights


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        print("usage: python -m primerl_hpc.runtime.supervisor RUN_DIR", file=sys.stderr)
        return ExitCode.USAGE
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        return asyncio.run(Supervisor(RunDir(Path(arguments[0]).resolve())).run())
    except PrimerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
