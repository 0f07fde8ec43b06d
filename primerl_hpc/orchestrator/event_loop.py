"""Runs a coroutine to its end on uvloop where it is installed; SIGTERM cancels it and ends the process promptly."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from primerl_hpc.common.errors import ExitCode, PrimerlError


class Terminated(PrimerlError):
    """SIGTERM: the supervisor ends this process; what was not saved is lost."""

    exit_code = ExitCode.PREEMPTED


def run_until_done(main: Coroutine[Any, Any, None]) -> None:
    """Raises what ``main`` raises (of several faults at once the first PrimerlError), Terminated after SIGTERM."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            runner.run(_with_sigterm(main))
        except BaseExceptionGroup as faults:  # of a task group; a lone PrimerlError passes as it is
            if (ours := faults.subgroup(PrimerlError)) is None:
                raise
            raise _first(ours) from faults


async def beside(main: Coroutine[Any, Any, None], *others: Coroutine[Any, Any, None]) -> None:
    """``main`` to its end, beside what goes on for ever; the first fault of any of them ends all."""
    tasks = [asyncio.create_task(each) for each in (*others, main)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Of uvloop; None, which is asyncio's own, where it is not installed."""
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
        raise Terminated("ended by SIGTERM") from None


def _first(faults: BaseExceptionGroup) -> PrimerlError:
    first = faults.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
