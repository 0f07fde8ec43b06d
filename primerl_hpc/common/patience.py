"""Looks at a shared filesystem that may falter for a moment: what was seen before stands, and one line of the log says so.

    patience = Patience("where the router is")
    with patience:                              # an OSError ends the block and goes no further
        url = read()
    patience.is_tried                           # whether it did at the last look

An error that lasts longer than the limit goes on. Without a limit that of a full disk does at once: it is not a moment's fault.

    await outlast("the batch", lambda: send(batch))     # what a run cannot go on without
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
FALTERS_S = 60.0
"""How long a run directory may answer with errors before that ends the run."""
AGAIN_S = 0.25

FULL = (errno.ENOSPC, errno.EDQUOT)


class Patience:
    def __init__(self, what: str, limit_s: float = math.inf) -> None:
        """``what``: cannot be seen meanwhile; for the log."""
        self.what, self.limit_s = what, limit_s
        self._since: float | None = None

    @property
    def is_tried(self) -> bool:
        return self._since is not None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self._since = None
        if not isinstance(error, OSError) or (error.errno in FULL and self.limit_s == math.inf):
            return False
        now = time.monotonic()
        if self._since is None:
            self._since = now
            logger.warning("cannot see %s, trying again: %s", self.what, error)
        return now - self._since <= self.limit_s


async def outlast(what: str, act: Callable[[], T]) -> T:
    """What ``act``, called in a thread, returns as soon as it can. Raises its OSError after `FALTERS_S`."""
    patience = Patience(what, FALTERS_S)
    while True:
        with patience:
            return await asyncio.to_thread(act)
        await asyncio.sleep(AGAIN_S)
