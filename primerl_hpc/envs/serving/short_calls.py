"""Short blocking calls of verifiers run in the event loop, because a thread costs more than they do.

    run_short_calls_inline()        # in the environment server, before verifiers serves

verifiers 0.4.0 starts two calls of each rollout on a thread: rendering the prompt and deleting the working folder. Each
costs two wake-ups and a future on both sides, more than rendering a short prompt or removing an empty folder.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

SHORT_S = 0.001
"""A call whose predecessor took longer than this runs on a thread."""


def run_short_calls_inline() -> None:
    """Patch verifiers in this process."""
    from verifiers.v1.clients import train
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime
    from verifiers.v1.utils import loaders

    train.RendererSlot = inline_slot(train.RendererSlot)
    runtime: Any = SubprocessRuntime
    runtime.teardown = inline_teardown(runtime.teardown)
    loaders._import_plugin = functools.cache(loaders._import_plugin)  # searches sys.path for each agent


def inline_slot(slot: type[Any]) -> type[Any]:
    """Return verifiers' `RendererSlot`, changed to render short prompts in the event loop."""

    class InlineSlot(slot):
        """A renderer that runs in the event loop while its calls are short and no thread uses it."""

        last_s = 0.0

        async def run(self, fn: Callable[[], Any]) -> Any:
            if self.last_s >= SHORT_S or not self.lock.acquire(blocking=False):
                return await super().run(functools.partial(self._timed, fn))
            try:
                return self._timed(fn)
            finally:
                self.lock.release()

        def _timed(self, fn: Callable[[], Any]) -> Any:
            started = time.perf_counter()
            try:
                return fn()
            finally:
                self.last_s = time.perf_counter() - started

    return InlineSlot


def inline_teardown(teardown: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `SubprocessRuntime.teardown`, changed to remove an empty working folder in the event loop."""

    @functools.wraps(teardown)
    async def remove_empty(self: Any) -> None:
        """Remove a working folder that is empty; leave anything else to verifiers."""
        if self.workdir is None or self._background:
            return await teardown(self)
        try:
            os.rmdir(self.workdir)
        except FileNotFoundError:
            pass
        except OSError:
            await teardown(self)

    return remove_empty
