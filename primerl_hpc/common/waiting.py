"""Wait for a condition, retry with back-off, tolerate transient I/O errors. Built on tenacity.

    await asyncio.sleep(paced(waited_s, 0.2, 2.0))              # between reads of shared files
    endpoint = wait_until(read, what="the router's endpoint", timeout_s=60)     # raises TimeoutWaitingError
    async for _ in Polling(timeout_s=60, poll_s=0.2):           # checks of a condition that ends the loop
    reply = retry(query, Backoff(limit_s=120), if_raises=UnansweredError)       # raises the last error
    await retry_io("the batch", lambda: send(batch))                            # an operation that must succeed
    rows = await in_daemon_thread(read, may_wait=lambda: not is_over)           # raises TimeoutWaitingError

    reads = TransientIOErrors("the router's endpoint")      # for a read that is repeated anyway
    with reads:                                             # an OSError ends the block and is logged once
        url = read()
    reads.is_failing                                        # True if the last block raised

    with repeating(30, lease.touch):                        # in a thread, until the block ends
        ...

Shared filesystems report EIO and ESTALE now and then although nothing is wrong. Such errors are tolerated up to a time
limit. Without a limit, "no space left" and "quota exceeded" are raised at once, because they do not pass by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_any,
    retry_if_exception,
    retry_if_exception_type,
    retry_if_result,
    stop_after_delay,
    stop_before_delay,
    wait_exponential,
    wait_fixed,
)

from primerl_hpc.common.errors import TimeoutWaitingError

logger = logging.getLogger(__name__)

T = TypeVar("T")
IO_RETRY_LIMIT_S = 60.0
"""Errors of the run directory's filesystem that last longer than this end the run."""
IO_RETRY_PAUSE_S = 0.25

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


# -- wait for a condition --------------------------------------------------------------------------


def wait_until(
    poll: Callable[[], T | None],
    *,
    what: str | Callable[[], str],
    timeout_s: float,
    poll_s: float = 0.1,
    poll_max_s: float = 1.0,
) -> T:
    """Call ``poll`` with growing pauses and return its first result that is not None or False.

    ``what`` names the condition in the error; a function is called when the time is up.
    Raises TimeoutWaitingError after ``timeout_s``, and whatever ``poll`` raises.
    """
    result = Retrying(**_polling(what, timeout_s, poll_s, poll_max_s))(poll)
    assert result is not None  # polling continues while it is None, or raises
    return result


def _polling(
    what: str | Callable[[], str], timeout_s: float, poll_s: float, poll_max_s: float
) -> dict[str, Any]:
    def give_up(_: RetryCallState) -> None:
        condition = what if isinstance(what, str) else what()
        raise TimeoutWaitingError(f"waited {timeout_s:.0f} s for {condition}")

    return {
        "retry": retry_if_result(lambda result: result is None or result is False),
        "stop": stop_after_delay(timeout_s),
        "wait": wait_exponential(multiplier=poll_s, exp_base=1.3, max=poll_max_s),
        "retry_error_callback": give_up,
    }


@dataclass(frozen=True)
class Polling:
    """The moments at which a ``for`` or ``async for`` loop checks a condition that needs more than a function.

    The first one is at once, the last one when ``timeout_s`` has passed (None: never).
    """

    timeout_s: float | None
    poll_s: float

    def __iter__(self) -> Iterator[None]:
        for pause_s in self._pauses():
            time.sleep(pause_s)
            yield

    async def __aiter__(self) -> AsyncIterator[None]:
        for pause_s in self._pauses():
            await asyncio.sleep(pause_s)
            yield

    def last(self, look: Callable[[], T], is_done: Callable[[T], bool]) -> T:
        """Return the first result of ``look`` that is done, or the last one."""
        pauses = self._pauses()
        time.sleep(next(pauses))
        while not is_done(result := look()) and (pause_s := next(pauses, None)) is not None:
            time.sleep(pause_s)
        return result

    def _pauses(self) -> Iterator[float]:
        deadline = math.inf if self.timeout_s is None else time.monotonic() + self.timeout_s
        yield 0.0
        while time.monotonic() < deadline:
            yield self.poll_s


PACE = 0.01


def paced(waited_s: float, first_s: float, last_s: float) -> float:
    """Return the pause before the next read of shared files: 1 % of the time waited so far, within the two limits.

    A wait thus ends at most 1 % late, and a long one causes few operations.
    """
    return min(max(first_s, PACE * waited_s), last_s)


# -- retry with back-off ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Backoff:
    """Pauses between calls: ``first_s``, then doubled up to ``last_s``. No call starts later than ``limit_s``."""

    limit_s: float
    first_s: float = 1.0
    last_s: float = 30.0


def retry(
    call: Callable[[], T],
    backoff: Backoff,
    *,
    if_raises: type[Exception] | tuple[type[Exception], ...] = (),
    if_result: Callable[[T], bool] = lambda result: False,
    before_pause: Callable[[Exception | None, float], None] = lambda error, pause_s: None,
) -> T:
    """Repeat ``call`` while it raises ``if_raises`` or ``if_result`` is true; return or raise its last outcome.

    ``before_pause`` receives the error, if any, and the pause in seconds; use it to log the retry.
    """
    return Retrying(**_retrying(backoff, if_raises, if_result, before_pause))(call)


async def retry_async(
    call: Callable[[], Awaitable[T]],
    backoff: Backoff,
    *,
    if_raises: type[Exception] | tuple[type[Exception], ...] = (),
    if_result: Callable[[T], bool] = lambda result: False,
    before_pause: Callable[[Exception | None, float], None] = lambda error, pause_s: None,
) -> T:
    """Same as `retry` on an event loop."""
    return await AsyncRetrying(**_retrying(backoff, if_raises, if_result, before_pause))(call)


def _retrying(backoff: Backoff, if_raises: Any, if_result: Any, before_pause: Any) -> dict[str, Any]:
    def announce(state: RetryCallState) -> None:
        assert state.outcome is not None and state.next_action is not None
        before_pause(state.outcome.exception(), state.next_action.sleep)

    return {
        "retry": retry_any(retry_if_exception_type(if_raises), retry_if_result(if_result)),
        "stop": stop_before_delay(backoff.limit_s),
        "wait": wait_exponential(multiplier=backoff.first_s, max=backoff.last_s),
        "before_sleep": announce,
        "retry_error_callback": lambda state: state.outcome.result(),
    }


# -- repetition ------------------------------------------------------------------------------------


@contextlib.contextmanager
def repeating(interval_s: float, action: Callable[[], object]) -> Iterator[None]:
    """Call ``action`` in a thread every ``interval_s`` until the block ends; its OSErrors are ignored."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(interval_s):
            with contextlib.suppress(OSError):
                action()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


# -- transient I/O errors --------------------------------------------------------------------------


class TransientIOErrors:
    """Context manager that suppresses OSErrors for at most ``limit_s`` and logs the first one of a series."""

    def __init__(self, what: str, limit_s: float = math.inf) -> None:
        """``what``: the object that cannot be accessed, for the log."""
        self.what, self.limit_s = what, limit_s
        self._since: float | None = None

    @property
    def is_failing(self) -> bool:
        """True if the last block raised an OSError."""
        return self._since is not None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self._since = None
            return False
        return self.is_tolerated(error)

    def is_tolerated(self, error: BaseException) -> bool:
        """True if ``error`` is transient and the series of errors that it belongs to is not too long yet."""
        if not isinstance(error, OSError) or (error.errno in DISK_FULL and self.limit_s == math.inf):
            return False
        now = time.monotonic()
        if self._since is None:
            self._since = now
            logger.warning("Cannot access %s, retrying: %s", self.what, error)
        return now - self._since <= self.limit_s


def _always() -> bool:
    return True


async def in_daemon_thread(
    call: Callable[[], T],
    *,
    may_wait: Callable[[], bool] = _always,
    limit_s: float = math.inf,
    poll_s: float = 0.25,
) -> T:
    """Return the result of ``call``, which runs in a thread that the exit of this process does not wait for.

    Python waits for the threads of `asyncio.to_thread` before it exits, so a filesystem that does not respond would
    block the exit. Raises TimeoutWaitingError after ``limit_s``, and if ``may_wait``, called every ``poll_s`` seconds,
    returns False. Then, and when the caller is cancelled, the call continues without effect on the caller.
    """
    deadline = time.monotonic() + limit_s
    outcome: Future[T] = Future()

    def run() -> None:
        outcome.set_running_or_notify_cancel()
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 raised in the caller
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=run, daemon=True).start()
    waiter = asyncio.wrap_future(outcome)
    try:
        while not (await asyncio.wait({waiter}, timeout=poll_s))[0]:
            if time.monotonic() >= deadline or not may_wait():
                raise TimeoutWaitingError("a file operation did not end in time")
        return waiter.result()
    finally:
        waiter.cancel()


async def retry_io(
    what: str, call: Callable[[], T], *, run: Callable[[Callable[[], T]], Awaitable[T]] = asyncio.to_thread
) -> T:
    """Return the result of ``call``, repeated while it raises an OSError for at most `IO_RETRY_LIMIT_S`.

    ``run`` executes ``call``; by default in a thread. Raises the last OSError.
    """
    errors = TransientIOErrors(what, IO_RETRY_LIMIT_S)
    retrying = AsyncRetrying(retry=retry_if_exception(errors.is_tolerated), wait=wait_fixed(IO_RETRY_PAUSE_S))
    return await retrying(run, call)
