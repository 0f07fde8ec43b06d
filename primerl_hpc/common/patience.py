"""Looks at a shared filesystem that may falter for a moment: what was seen before stands, and one line of the log says so.

    patience = Patience("where the router is")
    with patience:                              # an OSError ends the block and goes no further
        url = read()
    patience.is_tried                           # whether it did at the last look

A full disk is not a moment's fault: that error goes on.
"""

from __future__ import annotations

import errno
import logging
from types import TracebackType

logger = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)


class Patience:
    def __init__(self, what: str) -> None:
        """``what``: cannot be seen meanwhile; for the log."""
        self.what, self.is_tried = what, False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self.is_tried = False
        if not isinstance(error, OSError) or error.errno in FULL:
            return False
        if not self.is_tried:
            logger.warning("cannot see %s, trying again: %s", self.what, error)
        self.is_tried = True
        return True
