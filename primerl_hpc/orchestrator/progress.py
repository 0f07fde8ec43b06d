"""Write ``control/rollouts.json`` every few seconds: the state of the rollouts, for users who watch the run.

    {"time": 1.0, "in_flight": 8, "waiting": 4, "finished": 40, "failed": 12, "dropped_batches": 1,
     "episodes": {"env_server-0": 8},
     "failures": {"reverse-text": {"count": 12, "of_kind": 12, "last": "HarnessError: …"}},
     "process_limit": {"episodes": 2, "environments": ["my-tools"]},
     "high_error_rates": [{"environment": "reverse-text", "share": 0.3, "kinds": {"HarnessError": 12}, "log": "…"}]}

Metrics are written once per batch; before the first batch, and while none is shipped, only this file shows progress.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from primerl_hpc.common.files import write_json
from primerl_hpc.common.safety.printable import kind_of, one_line
from primerl_hpc.orchestrator.scheduling.dispatcher import Dispatcher
from primerl_hpc.run.rundir import RunDir

EVERY_S, UNCHANGED_S = 5.0, 60.0
"""Interval between writes; and of a file whose values other than its time are the same."""


@dataclass
class Failures:
    """Failed rollouts of an environment; every attempt counts."""

    last: str = ""
    kinds: Counter[str] = field(default_factory=Counter)

    def add(self, error: str) -> None:
        self.last = error
        self.kinds[kind_of(error)] += 1

    def as_json(self) -> dict[str, Any]:
        return {
            "count": self.kinds.total(),
            "of_kind": self.kinds[kind_of(self.last)],
            "last": one_line(self.last),
        }


class ProgressFile:
    """Receives values in the event loop at most every `EVERY_S`; a thread writes them."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._next = 0.0
        self._noted: dict[str, Any] | None = None
        self._written: dict[str, Any] = {}

    def is_due(self, now: float) -> bool:
        """True once per `EVERY_S`; ``now`` is the monotonic clock in seconds."""
        if now < self._next:
            return False
        self._next = now + EVERY_S
        return True

    def note(self, progress: dict[str, Any]) -> None:
        """Keep ``progress`` for the next `flush`."""
        self._noted = {"time": round(time.time(), 3), **progress}

    def flush(self) -> None:
        """Write the noted values. Filesystem errors are ignored: the run does not depend on this file."""
        noted, self._noted = self._noted, None
        if noted is None or not self._is_new(noted):
            return
        with contextlib.suppress(OSError):
            write_json(self.run.rollout_progress, noted)
            self._written = noted

    def _is_new(self, noted: dict[str, Any]) -> bool:
        values = {**self._written, "time": noted["time"]}
        return values != noted or noted["time"] - self._written["time"] >= UNCHANGED_S


def progress_of(
    dispatcher: Dispatcher,
    failures: Mapping[str, Failures],
    waiting: int = 0,
    dropped_batches: int = 0,
    episodes: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return the contents of the file.

    ``waiting``: finished rollouts that wait for a batch; ``dropped_batches``: batches dropped because nothing in them
    had a signal; ``episodes``: number of episodes at each environment server.
    """
    counters, limit = dispatcher.counters, dispatcher.process_limit
    return {
        "in_flight": dispatcher.in_flight,
        "waiting": waiting,
        "finished": counters.finished,
        "failed": counters.failed,
        "dropped_batches": dropped_batches,
        "episodes": dict(episodes or {}),
        "failures": {name: failure.as_json() for name, failure in failures.items()},
        "process_limit": None
        if limit is None
        else {"episodes": limit.rollouts, "environments": list(limit.labels)},
    }
