"""Faults of serving processes, as a bad day makes them: SIGKILL or SIGSTOP from outside, and what the run made of it.

fault = strike(run, "teacher-0", "freeze")
wait_for(lambda: fault.noticed(run), "it to be noticed"); wait_for(lambda: fault.mended(run), "its successor")
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import Any

from primerl_hpc.common.rundir import RunDir
from tests.e2e.runs import events, process_of

SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
DEPTHS = {"inference-0": 1, "router-0": 2, "env_server-0": 1, "teacher-0": 1}
"""Whom a fault may hit, and how far below its guard the process is that listens."""
NOTICED = ("role_hung", "role_restart_requested", "role_restarting")


@dataclass(frozen=True)
class Fault:
    process: str
    kind: str
    time: float

    def noticed(self, run: RunDir) -> dict[str, Any] | None:
        """The first event that says so."""
        return self._first(run, NOTICED)

    def mended(self, run: RunDir) -> dict[str, Any] | None:
        """The event of the successor that is ready."""
        return self._first(run, ("role_ready",))

    def _first(self, run: RunDir, names: tuple[str, ...]) -> dict[str, Any] | None:
        rows = [row for name in names for row in events(run, name)]
        later = [row for row in rows if row["process"] == self.process and row["time"] >= self.time]
        return min(later, key=lambda row: row["time"], default=None)


def strike(run: RunDir, process: str, kind: str) -> Fault:
    """``kind``: see SIGNALS."""
    victim, now = process_of(run.root, process, DEPTHS[process]), time.time()
    victim.send_signal(SIGNALS[kind])
    return Fault(process, kind, now)
