"""The supervisor: the batch process of a run. Starts every role, watches, restarts, tells the first fault, ends it all.

    python -m primerl_hpc.runtime.supervisor RUN_DIR

The story of one attempt: take the lock, find where to go on, then for each phase of the plan start its processes and
wait for exits, requests and signals until the policy says how the phase ended. Its exit code is the job's
(`ExitCode`). It is the only writer of control/state.json, events.jsonl and failure.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import ExitCode, OccupiedError, PrimerlError
from primerl_hpc.common.files import create_exclusive, is_there, read_json_or_none, write_text
from primerl_hpc.common.lock import TOUCH_EVERY_S, SupervisorLock
from primerl_hpc.common.log import setup_logging
from primerl_hpc.common.names import Kind, RunState
from primerl_hpc.common.rundir import STABLE, RunDir, ensure_api_key, forget_endpoints
from primerl_hpc.plan.types import PhasePlan, Plan, load_plan
from primerl_hpc.runtime.allocation import came_together, read_allocation, run_slurm, seconds_left
from primerl_hpc.runtime.guard import PR_SET_CHILD_SUBREAPER, children_of, end_descendants, prctl
from primerl_hpc.runtime.journal import Journal, patiently
from primerl_hpc.runtime.local_step import LocalStep
from primerl_hpc.runtime.nodes import Nodes
from primerl_hpc.runtime.phase import PhaseEnd, PhaseRun
from primerl_hpc.runtime.requeue import CANCEL, WALLTIME
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
        self.earlier: dict[str, Any] = read_json_or_none(run.state) or {}
        self.attempt = int(self.earlier.get("attempt", 0)) + 1
        self.journal = Journal(run, self.attempt)
        self.current: PhaseRun | None = None
        self.nodes: Nodes | None = None
        self.succession = Succession(self)
        self.ends_at = math.inf  # on the monotonic clock: when the walltime is over
        self.resumed_from = math.inf  # before the first phase has begun nothing is gained
        self.has_finished_a_phase = False
        self.signals: set[int] = set()
        self.inherited = frozenset(children_of(os.getpid()))
        """Children that are none of ours: the job's script became this process, and may have started some."""
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
            await self._open_attempt()
            if is_there(self.run_dir.stop_request):
                return await self._end_before_start()
            await self._read_allocation()
            if self.nodes is not None and not await came_together(self.nodes.allocation):
                self.journal.is_closing = True
                return await self._come_back_whole()
            if self.nodes is not None and not await self.nodes.look():
                self.journal.is_closing = True
                return await self._give_nodes_back(self.nodes)
            return await self._run_phases()
        except asyncio.CancelledError:
            if not self.journal.is_taken_over:  # a signal before the first phase
                return await self._end_before_start()
            raise OccupiedError(
                "another supervisor took this run directory over", place=str(self.run_dir.root)
            ) from None
        except Exception as error:
            if not self.journal.state:
                raise
            return await self._fail_by_ourselves(error)
        finally:
            await self.journal.settle()
            with contextlib.suppress(OSError):
                await self._drop_waiting_engines()
            heartbeat.cancel()
            end_descendants(grace_s=0.0)  # orphans whose guard was killed came to us: we are their subreaper
            if not self.journal.is_taken_over:
                self.journal.reserve.release()
            self.lock.release()
            # one that comes now finds a loop that is being closed; how we end is decided
            signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)

    async def _run_phases(self) -> ExitCode:
        journal = self.journal
        for phase in self.plan.phases:
            run = self.run_dir.phase(phase.name)
            if await patiently(lambda run=run, phase=phase: is_phase_done(run, phase)):
                continue
            if self.signals or await patiently(lambda: is_there(self.run_dir.stop_request)):
                return await self._end_before_start()  # what came while the phase before was torn down
            resumed = self.resumed_from = await patiently(partial(self.prepare_phase, phase), is_long=True)
            journal.state.setdefault("began", {"phase": phase.name, "step": resumed})
            journal.set_state(RunState.RUNNING, phase=phase.name, resumed_from=resumed)
            journal.record(
                "phase_started", phase=phase.name, kind=phase.recipe.kind.value, resumed_from=resumed
            )
            self.current = PhaseRun(self, phase)
            end = await self.current.run()
            if end != PhaseEnd.DONE:
                journal.is_closing = True
                return await self._close(end, await patiently(run.latest_checkpoint) or 0)
            self.current, self.has_finished_a_phase = None, True
            journal.record("phase_done", phase=phase.name)
        journal.is_closing = True
        await self.succession.end()
        journal.set_state(RunState.DONE)
        journal.record("run_done")
        return ExitCode.DONE

    async def _end_before_start(self) -> ExitCode:
        """People, or the scheduler, want the end before anything has begun, or between two phases."""
        self.journal.is_closing = True
        return await self._close(PhaseEnd.ABANDONED, await self._saved())

    async def _fail_by_ourselves(self, error: Exception) -> ExitCode:
        """What nobody foresaw is told like any other fault."""
        self.journal.is_closing = True
        if isinstance(error, PrimerlError):  # a sentence for people
            log.error("%s", error)
            told, code = str(error), error.exit_code
        else:
            log.exception("the supervisor failed")
            told, code = f"{type(error).__name__}: {error}", ExitCode.FAILED
        self.journal.write_own_failure("the supervisor failed", told, code)
        end = await self._close(PhaseEnd.FAILED, await self._saved())
        return code if end == ExitCode.FAILED else end

    async def _saved(self) -> int:
        """The step after which an attempt would go on now."""
        return (await patiently(self.begins) or {"step": 0})["step"]

    async def _close(self, end: PhaseEnd, saved: int) -> ExitCode:
        journal = self.journal
        await journal.settle()
        reason = await self.succession.hand_over(end, saved) if self.nodes is not None else ""
        if reason is None:
            codes = {PhaseEnd.STOPPED: ExitCode.STOPPED, PhaseEnd.ABANDONED: ExitCode.PREEMPTED}
            return codes.get(end, ExitCode.FAILED)
        await self.succession.end()
        journal.write(lambda: self.run_dir.stop_request.unlink(missing_ok=True))  # served
        journal.state["message"] = reason or None
        if end == PhaseEnd.ABANDONED and self.current is not None and self.current.is_out_of_nodes:
            return self._fail(reason)
        if end == PhaseEnd.ABANDONED and not reason:  # people asked for it
            journal.set_state(RunState.CANCELLED)
            journal.record("run_cancelled")
            return ExitCode.PREEMPTED
        if end in (PhaseEnd.STOPPED, PhaseEnd.ABANDONED):
            journal.set_state(RunState.STOPPED)
            journal.record("run_stopped")
            return ExitCode.STOPPED if end == PhaseEnd.STOPPED else ExitCode.PREEMPTED
        return self._fail(reason)

    def _fail(self, reason: str = "") -> ExitCode:
        failure = self.journal.failure
        message = reason or failure.get("message")
        self.journal.set_state(RunState.FAILED, message=message)
        self.journal.record("run_failed", process=failure.get("process"), message=message)
        code = failure.get("exit_code")
        keeps = (ExitCode.DATA, ExitCode.CONFIG, ExitCode.NO_CONTINUE, ExitCode.BAD_NODE)
        return ExitCode(code) if code in keeps else ExitCode.FAILED

    async def _give_nodes_back(self, nodes: Nodes) -> ExitCode:
        """Too few good nodes: back into the queue without the bad ones, unless the last attempt tried just that."""
        if not nodes.has_news:
            self.journal.record("nodes_bad_again", nodes=sorted(nodes.excluded))
        saved = await self._saved()
        if await self.succession.give_nodes_back(saved, is_hopeful=nodes.has_news) is None:
            return ExitCode.BAD_NODE
        await self.succession.end()
        return self._fail()

    async def _come_back_whole(self) -> ExitCode:
        """This component of a heterogeneous job was lost and came back alone: the whole job goes into the queue again."""
        self.journal.record("came_back_alone", host=self.journal.state["host"])
        reason = await self.succession.give_nodes_back(await self._saved())
        if reason is None:
            return ExitCode.PREEMPTED
        await self.succession.end()
        return self._fail(f"the head was lost and came back alone; {reason}")

    # -- before the first process ----------------------------------------------------------------------------------

    async def _open_attempt(self) -> None:
        # first: what ends us while we clear up is told by it
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
        await patiently(self._clear_earlier_life)
        self.journal.reserve.make()
        self.journal.set_state(RunState.STARTING)
        self.journal.record("attempt_started", attempt=self.attempt, host=state["host"], job=state["job_id"])

    def _clear_earlier_life(self) -> None:
        """And make the folder of our logs. May be tried again when it failed half-way."""
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
        if self.nodes is not None:
            return SrunStep(launch, self.nodes.allocation)
        return LocalStep(launch, has_gpus=self.plan.accelerator == "gpu")

    async def _read_allocation(self) -> None:
        if self.plan.scheduler != "slurm":
            return
        allocation = read_allocation(self.plan)
        self.nodes = Nodes(self, allocation, self.earlier.get("nodes") or {})
        self.set_nodes(allocation.hosts, self.nodes.as_state())
        await self.look_at_walltime()

    async def _drop_waiting_engines(self) -> None:
        """Engines that run see the end of the run themselves; those still in the queue would start for nothing.

        Not after a failure, or a SIGTERM that nobody of ours asked for: SLURM may put the job of a lost node, or a
        preempted one, back into the queue.
        """
        engines = (read_json_or_none(self.run_dir.job) or {}).get("engines_job_id")
        ended = self.journal.state.get("state")
        may_come_back = signal.SIGTERM in self.signals and not self.succession.is_cancelled
        is_over = ended in (RunState.STOPPED, RunState.CANCELLED) and not may_come_back
        if engines is not None and (ended == RunState.DONE or is_over):
            await run_slurm("scancel", "--state=PENDING", engines)

    async def look_at_walltime(self) -> None:
        """Read when the job ends; it may have been given more time since the last look."""
        assert self.nodes is not None
        if (left := await seconds_left(self.nodes.allocation.job_id)) is not None:
            self.ends_at = time.monotonic() + left
            self.journal.update(ends_at=round(time.time() + left) if math.isfinite(left) else None)

    def seconds_left(self) -> float:
        """Until the walltime; infinite without one."""
        return self.ends_at - time.monotonic()

    def set_nodes(self, hosts: Sequence[str], nodes: dict[str, Any]) -> None:
        """``hosts`` by node index of the plan; ``nodes``: what `Nodes` wants to know in the next attempt."""
        told = "\n".join(hosts) + "\n"
        self.journal.write(lambda: write_text(self.run_dir.attempt_hosts(self.attempt), told))
        self.journal.update(hosts=list(hosts), nodes=nodes)

    def forget_endpoints(self, process: str) -> None:
        """Of a process of ours that has ended; a successor of this supervisor has processes of the same names."""
        self.journal.write(
            lambda: forget_endpoints(self.run_dir, process) if self._is_owner() else None, is_vital=True
        )

    def request_stop(self, reason: str) -> None:
        """As people do, for everybody who looks at control/stop. What they asked for before stays."""
        request = json.dumps({"reason": reason})
        self.journal.write(lambda: create_exclusive(self.run_dir.stop_request, request), is_vital=True)

    # -- signals, heartbeat, strays -------------------------------------------------------------------------------------

    def _install_signal_handlers(self) -> None:
        """USR2: the walltime is near, save. TERM: save if it can be quick. A second TERM or INT: end now."""
        loop = asyncio.get_running_loop()
        for number in HANDLED:
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, lambda: None)  # the terminal went away; the run stays

    def _on_signal(self, number: int) -> None:
        self.journal.record("signal", signal=signal.Signals(number).name)
        self.signals.add(number)
        if self.journal.is_closing:
            return
        if self.current is not None:
            self.current.on_signal(number)
        elif self.main is not None:
            if number == signal.SIGUSR2:
                self.request_stop(WALLTIME)
            self.main.cancel()

    async def _keep_lock_alive(self) -> None:
        assert self.main is not None
        while self._is_owner():
            await asyncio.sleep(TOUCH_EVERY_S)
        self.main.cancel()

    def _is_owner(self) -> bool:
        """Says that we live, and finds out whether the run directory is still ours."""
        if not self.journal.is_taken_over:
            with contextlib.suppress(OSError):  # a filesystem that falters says nothing of the lock
                self.journal.is_taken_over = not self.lock.touch()
        return not self.journal.is_taken_over


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
