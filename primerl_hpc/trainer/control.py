"""Decisions of rank 0 for all ranks: stop and checkpoint requests; reports at the end of the process.

with StepFiles(run, world) as files:                                 # the thread that uses the run directory
    request = read_requests(run, world, files, has_failed=False)
    files.write(lambda: writer.append(row))                          # does not wait for a stalled filesystem
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum
from typing import Any, TypeVar

from primerl_hpc.common.files import create_exclusive, is_there, read_json_or_none, write_json
from primerl_hpc.common.node.start_phases import own_phases
from primerl_hpc.common.waiting import paced
from primerl_hpc.run.endpoints import ControlWatch, must_save, publish_start
from primerl_hpc.run.rundir import GOAL, RunDir
from primerl_hpc.trainer.perf import StepProfiler
from primerl_hpc.trainer.setup import World, broadcast_from_rank0
from primerl_hpc.transport.rollouts.micro_batch import RolloutReceiver

WAIT_ROUND_S = 5.0  # waiting ranks exchange a result this often, so that no collective times out
FIRST_POLL_S, BUSY_POLL_S, IDLE_POLL_S = 0.005, 0.25, 4.0
"""Intervals between looks for a batch: at first, growing to the second one, and in a long wait."""
PATIENCE_S = 0.25
"""Time that a training step waits for the run directory before it continues without a result."""
REPORT_AFTER_S = 10.0
"""A call that takes longer is reported. Deleting an old version of gigabytes takes seconds on a healthy filesystem."""

T = TypeVar("T")

log = logging.getLogger("primerl_hpc.trainer")


class Next(IntEnum):
    """Result of a wait for a batch."""

    WAIT = 0
    BATCH = 1
    STOP = 2
    FULL_WEIGHTS = 3


class Requests(IntEnum):
    NONE = 0
    RETRY = 1  # repeat a failed background save
    CHECKPOINT = 2
    STOP = 3

    @property
    def can_wait(self) -> bool:
        """True if the save may be written in the background: no user or job waits for it."""
        return self <= Requests.RETRY


def wait_for_batch(run: RunDir, receiver: RolloutReceiver, step: int, world: World) -> Next:
    """Wait until batch ``step`` exists, or a request comes first. Collective, no time limit."""
    wait = _Wait(run, receiver, step)
    while True:
        found = broadcast_from_rank0(wait.round() if world.is_leader else Next.WAIT)
        if found != Next.WAIT:
            return Next(found)


class _Wait:
    """Looks for a batch and for requests, rarely in a long wait."""

    def __init__(self, run: RunDir, receiver: RolloutReceiver, step: int) -> None:
        self.run, self.receiver, self.step = run, receiver, step
        self.control = ControlWatch(run)
        self.began, self.poll_s = time.monotonic(), FIRST_POLL_S

    def round(self) -> Next:
        """Return what comes first within `WAIT_ROUND_S`."""
        deadline = time.monotonic() + WAIT_ROUND_S
        while (now := time.monotonic()) < deadline:
            if self.control.is_save_requested():
                return Next.STOP
            if self.receiver.is_ready(self.step):
                return Next.BATCH
            if self.control.has(self.run.full_weights_request):
                return Next.FULL_WEIGHTS
            time.sleep(self.poll_s)
            longest_s = paced(now - self.began, BUSY_POLL_S, IDLE_POLL_S)
            self.poll_s = min(self.poll_s * 1.5, longest_s)
        return Next.WAIT


class StepFiles:
    """Uses the run directory in a thread, so that a filesystem that does not respond does not stop training.

    A call that is not done after `PATIENCE_S` continues in the thread, and training continues without its result. While
    one is late, writes are queued and reads are omitted. The end of the block waits for all writes.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._pending: list[Future] = []
        self._late_since: float | None = None
        self._is_reported = False

    def __enter__(self) -> StepFiles:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            return
        self._thread.shutdown()
        self._take_finished()

    def read(self, call: Callable[[], T], default: T) -> T:
        """Return the result of ``call``, or ``default`` if the filesystem does not respond. Raises its exception."""
        if self._take_finished():
            return default
        future = self._thread.submit(call)
        with contextlib.suppress(TimeoutError):
            return future.result(PATIENCE_S)
        self._note_late(future)
        return default

    def write(self, call: Callable[[], object]) -> None:
        """Do ``call`` after the earlier ones. Raises its exception, or that of an earlier call that was late."""
        is_late = self._take_finished()
        future = self._thread.submit(call)
        if is_late:
            self._pending.append(future)
            return
        try:
            future.result(PATIENCE_S)
        except TimeoutError:
            self._note_late(future)

    def _note_late(self, future: Future) -> None:
        self._pending.append(future)
        self._late_since = time.monotonic() - PATIENCE_S
        self._is_reported = False

    def _take_finished(self) -> bool:
        """Remove finished calls, raise the exception of the first failed one; True if a call is still not done."""
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()
        if self._late_since is not None:
            seconds = time.monotonic() - self._late_since
            if self._pending and seconds > REPORT_AFTER_S and not self._is_reported:
                log.warning("The run directory does not respond; training continues")
                self._is_reported = True
            if not self._pending:
                if self._is_reported:
                    log.warning("The run directory responds again after %.0f s", seconds)
                self._late_since = None
        return bool(self._pending)


def read_requests(
    run: RunDir,
    world: World,
    files: StepFiles | None = None,
    *,
    has_failed: bool,
    profiler: StepProfiler | None = None,
) -> Requests:
    """Return the request to serve at a step boundary: stop before checkpoint before the retry of a save. Collective.

    ``has_failed``: rank 0 knows that the last save failed. ``profiler``: receives requests for traces, on all ranks.
    """

    def requested() -> tuple[Requests, dict[str, Any] | None]:
        traces = profiler.find_request() if profiler is not None else None
        if must_save(run):
            return Requests.STOP, traces
        return Requests.CHECKPOINT if run.checkpoint_request.exists() else Requests.NONE, traces

    found, traces = Requests.NONE, None
    if world.is_leader:
        found, traces = requested() if files is None else files.read(requested, (Requests.NONE, None))
    if found == Requests.NONE and has_failed:
        found = Requests.RETRY
    found, traces = broadcast_from_rank0((int(found), traces))
    if profiler is not None:
        profiler.accept(traces)
    return Requests(found)


def is_goal_reached(run: RunDir, world: World) -> bool:
    """True if the run stops because of ``stop_when``: no attempt follows. Collective."""
    request = (read_json_or_none(run.stop_request) or {}) if world.is_leader else {}
    return broadcast_from_rank0(request.get("reason") == GOAL)


def clear_checkpoint_request(run: RunDir, world: World) -> None:
    """Delete the checkpoint request after the requested checkpoint is saved."""
    if world.is_leader:
        run.checkpoint_request.unlink(missing_ok=True)


def take_full_version_request(run: RunDir, world: World) -> bool:
    """True if an engine requested a full version; deletes the request. Collective."""
    is_requested = world.is_leader and is_there(run.full_weights_request)
    if is_requested:
        run.full_weights_request.unlink(missing_ok=True)
    return broadcast_from_rank0(is_requested)


# -- reports at the end: torchrun's own exit code is only 0 or 1 -----------------------------------


def write_outcome(run: RunDir, process: str, outcome: str, step: int) -> None:
    """Write the outcome: ``done`` or ``stopped`` (saved, to be continued). ``step``: the last finished one."""
    write_json(run.outcome(process), {"process": process, "outcome": outcome, "step": step})


def write_error(
    run: RunDir, process: str, *, rank: int, exit_code: int, message: str, is_cause: bool
) -> None:
    """Write the error report. ``is_cause``: it replaces other reports, which may only echo a peer's failure."""
    row = {"process": process, "rank": rank, "exit_code": exit_code, "message": message}
    if is_cause:
        write_json(run.error(process), row)
    else:
        create_exclusive(run.error(process), json.dumps(row) + "\n")


def report_start(run: RunDir, world: World) -> None:
    """Publish the times of the leader's start, when it has its model and checkpoint."""
    own_phases().end("model")
    if world.is_leader:
        publish_start(run, own_phases().seconds)
