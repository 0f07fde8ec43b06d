"""Run a coroutine to completion, on uvloop if installed; SIGTERM cancels it and ends the process promptly."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

from primerl_hpc.common.errors import ExitCode, PrimerlError
from primerl_hpc.common.waiting import paced

PATIENCE_S = 1.0
"""Time that rollouts wait for a check of files before they continue without its result."""


class Terminated(PrimerlError):
    """SIGTERM: the supervisor ends this process; unsaved state is lost."""

    exit_code = ExitCode.PREEMPTED


class StoppedOnRequest(PrimerlError):
    """The run was asked to stop and the orchestrator's state is saved: the run can be resumed."""

    exit_code = ExitCode.STOPPED


def run_until_done(main: Coroutine[Any, Any, None]) -> None:
    """Run ``main``; raise what it raises, and Terminated after SIGTERM.

    If a task group raised several errors, the first PrimerlError among them is raised.
    """
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            runner.run(_with_sigterm(main))
        except BaseExceptionGroup as errors:  # from a task group; a single PrimerlError is not in a group
            if (primerl_errors := errors.subgroup(PrimerlError)) is None:
                raise
            raise _first(primerl_errors) from errors


async def run_with_background(
    main: Coroutine[Any, Any, None], *background: Coroutine[Any, Any, None]
) -> None:
    """Run ``main`` to completion while ``background`` coroutines run; the first error of any of them ends all."""
    tasks = [asyncio.create_task(coroutine) for coroutine in (*background, main)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class BackgroundCheck:
    """Runs a check of files now and then; the caller continues if a filesystem does not respond."""

    def __init__(self, check: Callable[[], Coroutine[Any, Any, None]], every_s: float, idle_s: float) -> None:
        """``every_s``: interval, which grows to ``idle_s`` with the time since `note_change`."""
        self.check, self.every_s, self.idle_s = check, every_s, idle_s
        self._task: asyncio.Task[None] | None = None
        self._began_at = self._changed_at = time.monotonic()

    def note_change(self) -> None:
        self._changed_at = time.monotonic()

    async def run_if_due(self) -> None:
        """Start the check if it is due, and wait for it up to `PATIENCE_S`. Raises its exception."""
        now, patience_s = time.monotonic(), 0.0
        if self._task is None:
            if now - self._began_at < paced(now - self._changed_at, self.every_s, self.idle_s):
                return
            self._began_at, patience_s = now, PATIENCE_S
            self._task = asyncio.create_task(self.check())
        await asyncio.wait({self._task}, timeout=patience_s)
        if self._task.done():
            await self.finish()

    async def finish(self) -> None:
        """Wait for the check that is running. Raises its exception."""
        task, self._task = self._task, None
        if task is not None:
            await task


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop factory, or None (asyncio's own loop) if uvloop is not installed."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


async def _with_sigterm(main: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(main)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        raise Terminated("terminated by SIGTERM") from None


def _first(errors: BaseExceptionGroup[PrimerlError]) -> PrimerlError:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
