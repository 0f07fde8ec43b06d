"""Faults of serving processes: SIGKILL or SIGSTOP from outside, and the reaction of the run.

fault = strike(run, "teacher-0", "freeze")
wait_for(lambda: fault.noticed(run), "it to be noticed"); wait_for(lambda: fault.replaced(run), "its successor")
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import Any

from primerl_hpc.run.rundir import RunDir
from tests.support.runs import events, process_of

SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
DEPTHS = {"inference-0": 1, "router-0": 1, "env_server-0": 1, "teacher-0": 1}
"""Roles with faults, and the depth of the listening process below its guard."""
NOTICED = ("role_hung", "role_restart_requested", "role_restarting")


@dataclass(frozen=True)
class Fault:
    process: str
    kind: str
    time: float

    def noticed(self, run: RunDir) -> dict[str, Any] | None:
        """Return the first event that reports the fault."""
        return self._first(run, NOTICED)

    def replaced(self, run: RunDir) -> dict[str, Any] | None:
        """Return the event of the ready successor."""
        return self._first(run, ("role_ready",))

    def _first(self, run: RunDir, names: tuple[str, ...]) -> dict[str, Any] | None:
        rows = [row for name in names for row in events(run, name)]
        later = [row for row in rows if row["process"] == self.process and row["time"] >= self.time]
        return min(later, key=lambda row: row["time"], default=None)


def strike(run: RunDir, process: str, kind: str) -> Fault:
    """Send the signal of ``kind`` (see SIGNALS)."""
    victim, now = process_of(run.root, process, DEPTHS[process]), time.time()
    victim.send_signal(SIGNALS[kind])
    return Fault(process, kind, now)
