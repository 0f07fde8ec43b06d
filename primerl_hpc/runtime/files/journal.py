"""The supervisor's writes to the run directory (state.json, events, failure.json), done by a thread in order.

    journal.record("role_started", process="trainer-0")     # returns at once
    journal.catch_up()                                      # waits for all writes; OSError while one is refused
    await journal.settle()                                  # before the end: waits for a limited time
    step = await retry_run_directory(run.latest_checkpoint) # a read that the run cannot continue without

Shared filesystems do not respond for minutes now and then, and return errors (EIO, ESTALE) that no process of the run
causes. So no decision blocks on a write: the event loop continues to handle signals and exits of processes. Errors
that last longer than `IO_RETRY_LIMIT_S` are a fault; a filesystem that does not respond is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from primerl_hpc.common.errors import ExitCode, TimeoutWaitingError
from primerl_hpc.common.files import write_json
from primerl_hpc.common.names import RunState
from primerl_hpc.common.waiting import (
    DISK_FULL,
    IO_RETRY_LIMIT_S,
    IO_RETRY_PAUSE_S,
    TransientIOErrors,
    in_daemon_thread,
    retry_io,
)
from primerl_hpc.run.endpoints import forget_endpoints
from primerl_hpc.run.lock import SupervisorLock
from primerl_hpc.run.records import append_events, event_row
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.failures import FailureOrigin, supervisor_failure, write_failure
from primerl_hpc.runtime.files.reserve import DiskReserve

T = TypeVar("T")

RUN_DIRECTORY = "the run directory"
COALESCE_S = 0.2
"""Time that a write of state.json waits for further changes, for example by the starts of many processes."""
COALESCE_PART = 0.5
"""Time that it waits while changes follow one another, as a part of the time since the first of them."""
MAX_COALESCE_S = 10.0
SERIES_S = 5.0
"""A change this long after the last one begins a new series."""
SETTLE_POLL_S = 0.02
RELEASE_S = 5.0
"""Time to release lock and disk reserve."""

logger = logging.getLogger(__name__)


def run_directory_errors() -> TransientIOErrors:
    """Return a context that tolerates transient errors of the run directory."""
    return TransientIOErrors(RUN_DIRECTORY, IO_RETRY_LIMIT_S)


async def retry_run_directory(call: Callable[[], T], *, limit_s: float = math.inf) -> T:
    """Return the result of ``call``, which runs in a thread and is repeated while the run directory returns errors.

    Raises OSError after `IO_RETRY_LIMIT_S` of errors, TimeoutWaitingError if one call takes longer than ``limit_s``.
    """

    async def run(call: Callable[[], T]) -> T:
        work = asyncio.create_task(in_daemon_thread(call, limit_s=limit_s))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # it must not run concurrently with what follows
            await asyncio.wait({work}, timeout=IO_RETRY_LIMIT_S)
            raise

    return await retry_io(RUN_DIRECTORY, call, run=run)


@dataclass
class _Write:
    call: Callable[[], object]
    may_use_reserve: bool
    state: dict[str, Any] | None = None
    """The content of state.json, if that is what is written. Replaced while the write waits."""
    events: list[dict[str, Any]] | None = None
    """Rows of events.jsonl, if those are what is written. Extended while the write waits."""
    begins_at: float = 0.0
    """When the write may begin, on the monotonic clock, unless `Journal.catch_up` waits for it."""
    has_begun: bool = False

    @property
    def run_state(self) -> str | None:
        return self.state["state"] if self.state is not None else None


class Journal:
    def __init__(self, run: RunDir, attempt: int) -> None:
        self.run_dir, self.attempt = run, attempt
        self.reserve = DiskReserve(run.reserve)
        self.lock = SupervisorLock(run.supervisor_lock)
        self.state: dict[str, Any] = {}
        self.failure: dict[str, Any] = {}
        """The first failure of this attempt."""
        self.is_closing = False
        """The run is ending: writes are final reports, which may use the disk reserve."""
        self.is_taken_over = False
        """Another supervisor owns the run directory; nothing may be written any more."""
        self._pending: deque[_Write] = deque()
        self._changed = threading.Condition()
        """Guards the attributes below and ``_pending``."""
        self._thread: threading.Thread | None = None
        self._series = (-math.inf, -math.inf)
        """When the present series of writes of state.json began, and until when another one continues it."""
        self._last_state = ""
        """The state of the last write of state.json."""
        self._num_waiting = 0
        """Number of callers that wait for all writes."""
        self._tries = 0
        """Number of the last try to write."""
        self._error: tuple[int, OSError] | None = None
        """Number and error of the last try, if it failed."""
        self._is_awaited = False
        """True if the next try must not be delayed."""
        self._first_since = 0.0
        """When the first pending write became the first one."""

    def is_owner(self) -> bool:
        """Touch the lock; return True if the run directory still belongs to this supervisor."""
        if not self.is_taken_over:
            with contextlib.suppress(OSError):  # a transient I/O error is no evidence about the lock
                self.is_taken_over = not self.lock.touch()
        return not self.is_taken_over

    def forget_endpoints(self, process: str) -> None:
        """Delete the endpoints of an exited process. Not if another supervisor owns the run: its names are equal."""
        self.write(
            lambda: forget_endpoints(self.run_dir, process) if self.is_owner() else None, is_vital=True
        )

    # -- records -----------------------------------------------------------------------------------

    def set_state(self, state: RunState, **values: Any) -> None:
        """Update state.json. A waiting write of the same state is replaced by this one.

        A write that changes the state begins at once. Another one waits for further changes: a series of them thus
        causes a number of writes that grows with the logarithm of its duration.
        """
        is_change, self._last_state = state.value != self._last_state, state.value
        self.state.update(state=state.value, updated=round(time.time(), 3), **values)
        processes = {name: dict(values) for name, values in self.state.get("processes", {}).items()}
        content = {**self.state, **({"processes": processes} if "processes" in self.state else {})}
        with self._changed:
            states = [write for write in self._pending if write.run_state]
            if states and not states[-1].has_begun and states[-1].run_state == state.value:
                states[-1].state = content
                return
        write = _Write(
            lambda: write_json(self.run_dir.state, write.state, is_durable=is_change),
            self.is_closing,
            content,
            begins_at=time.monotonic() + (0.0 if is_change else self._seconds_to_coalesce()),
        )
        self._append(write)

    def _seconds_to_coalesce(self) -> float:
        now = time.monotonic()
        began, until = self._series
        if now > until:
            began = now
        wait_s = min(max(COALESCE_S, COALESCE_PART * (now - began)), MAX_COALESCE_S)
        self._series = began, now + wait_s + SERIES_S
        return wait_s

    def update(self, **values: Any) -> None:
        """Update values of state.json; the state stays."""
        self.set_state(RunState(self.state["state"]), **values)

    def set_process(self, name: str, **values: Any) -> None:
        if values.get("incarnation"):
            self._series = (-math.inf, -math.inf)  # a restart is recorded without the wait of a long start
        self.state["processes"].setdefault(name, {}).update(values)
        self.update()

    def give_up(self, name: str, status: str, message: str) -> None:
        """Record that the run continues without this process, and why."""
        self.set_process(name, exit=f"{status}: {message}")
        self.record("role_given_up", process=name, message=message)

    def record(self, event: str, **details: Any) -> None:
        self._record(event_row(event, **details))
        text = " ".join(f"{key}={value}" for key, value in details.items() if value is not None)
        logger.info("%s %s", event, text)

    def _record(self, row: dict[str, Any]) -> None:
        """Write the row, together with events that wait."""
        with self._changed:
            last = self._pending[-1] if self._pending else None
            if last is not None and last.events is not None and not last.has_begun:
                last.events.append(row)
                return
        events = [row]
        self._append(_Write(lambda: append_events(self.run_dir, events), self.is_closing, events=events))

    def write_failure(self, failure: dict[str, Any]) -> None:
        self.failure = self.failure or failure
        self.write(lambda: write_failure(self.run_dir, failure), is_vital=True)

    def write_own_failure(self, reason: str, message: str, code: ExitCode) -> None:
        origin = FailureOrigin(self.attempt, self.state.get("phase"), "supervisor", socket.gethostname())
        self.write_failure(supervisor_failure(origin, exit_code=code, reason=reason, message=message))

    # -- writes ------------------------------------------------------------------------------------

    def write(self, write: Callable[[], object], *, is_vital: bool = False) -> None:
        """Write after the earlier ones, again while the filesystem returns errors: see `catch_up`.

        On a full disk only final reports and vital files are written, in the space of the reserve; the rest is dropped.
        The run then ends by the failure of the role that needs the space, not by the supervisor's.
        """
        self._append(_Write(write, is_vital or self.is_closing))

    def catch_up(self) -> None:
        """Wait until no write is pending. Raises OSError while the filesystem refuses one."""
        with self._waiting(), self._changed:
            earlier, self._is_awaited = self._tries, True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pending or (self._error and self._error[0] > earlier))
            if self._pending and self._error is not None:
                raise self._error[1].with_traceback(None)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Writes do not wait for further changes until the block ends."""
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._num_waiting -= 1

    @property
    def is_settled(self) -> bool:
        """True if no write is pending, except records that wait for further ones."""
        with self._changed:
            return not self._pending or time.monotonic() < self._pending[0].begins_at

    async def settle(self) -> None:
        """Wait until no write is pending, or one has been for `IO_RETRY_LIMIT_S`. Call before the end."""
        with self._waiting():
            while (
                self._pending
                and not self.is_taken_over
                and time.monotonic() - self._first_since < IO_RETRY_LIMIT_S
            ):
                await asyncio.sleep(SETTLE_POLL_S)

    async def release_lock(self, *, with_reserve: bool = False) -> None:
        """Release the lock, and the disk reserve, if they are this supervisor's.

        A filesystem that does not respond is not waited for: the lock of an exited process is stale.
        """

        def release() -> None:
            if with_reserve and not self.is_taken_over:
                self.reserve.release()
            self.lock.release()

        with contextlib.suppress(TimeoutWaitingError):
            await in_daemon_thread(release, limit_s=RELEASE_S)

    def _append(self, write: _Write) -> None:
        with self._changed:
            if self.is_taken_over:
                return
            if not self._pending:
                self._first_since = time.monotonic()
            if write.events is None:
                for earlier in self._pending:
                    earlier.begins_at = min(earlier.begins_at, write.begins_at)
            self._pending.append(write)
            self._changed.notify_all()
            if self._thread is None:
                # a daemon: the exit of this process does not wait for a write that the kernel does not finish
                self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
                self._thread.start()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending)
                write = self._pending[0]
                while (wait_s := write.begins_at - time.monotonic()) > 0:
                    if self._num_waiting or self.is_closing:
                        break
                    self._changed.wait(wait_s)
                self._tries, self._is_awaited, write.has_begun = self._tries + 1, False, True
            try:
                if not self.is_taken_over:
                    self._do(write)
            except OSError as error:
                self._note_error(error)
                continue
            with self._changed:
                self._error, self._first_since = None, time.monotonic()
                self._pending.popleft()
                self._changed.notify_all()

    def _note_error(self, error: OSError) -> None:
        """Pause before the next try."""
        with self._changed:
            if self._error is None:
                logger.warning("Write to the run directory failed, trying again: %s", error)
            self._error = self._tries, error
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_awaited, IO_RETRY_PAUSE_S)

    def _do(self, write: _Write) -> None:
        try:
            write.call()
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            if write.may_use_reserve:
                self.reserve.spend()
                with contextlib.suppress(OSError):
                    write.call()
