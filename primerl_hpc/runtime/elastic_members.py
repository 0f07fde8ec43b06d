"""Elastic engines as the run's supervisor sees them: which engines joined, left or stopped responding.

Each engine's host (`engine_host.py`) touches the engine's endpoint file. An endpoint that is no longer touched belongs
to a lost node: it is deleted, so that router and fleet drop the engine. A host that was only slow publishes it again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from primerl_hpc.run.endpoints import EndpointWatch, forget_endpoints
from primerl_hpc.run.rundir import RunDir

SILENT_S = 20.0
CHECK_S = SILENT_S / 4
"""Interval between reads of the endpoints' modification times."""


class ElasticEngines:
    def __init__(self, run: RunDir, names: list[str]) -> None:
        self.run_dir, self.names = run, names
        self.watch = EndpointWatch(run)
        self.present: dict[str, dict[str, Any]] = {}
        self._next_check = 0.0

    def changes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (name, ``{"state": "joined"|"left", "url", "incarnation"}``) for each change since the last call."""
        if not self.names:
            return
        published = self.watch.all()
        if time.monotonic() >= self._next_check:
            self._forget_silent([name for name in self.names if name in published])
            self._next_check = time.monotonic() + CHECK_S
            published = self.watch.all()
        for name in self.names:
            found, before = published.get(name), self.present.get(name)
            if found == before:
                continue
            if before is not None:
                del self.present[name]
                yield name, _change("left", before)
            if found is not None:
                self.present[name] = found
                yield name, _change("joined", found)

    def hurry(self) -> None:
        """Read everything at the next call: a change is expected."""
        self.watch.hurry()
        self._next_check = 0.0

    def _forget_silent(self, names: list[str]) -> None:
        """Delete the endpoints of lost nodes.

        The timestamps compared are of one filesystem, whose clock also stamps our lock: clocks of nodes differ.
        """
        now = self.run_dir.supervisor_lock.stat().st_mtime if names else 0.0
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                if now - self.run_dir.endpoint(name).stat().st_mtime > SILENT_S:
                    forget_endpoints(self.run_dir, name)
                    self.watch.hurry()


def _change(state: str, endpoint: dict[str, Any]) -> dict[str, Any]:
    return {"state": state, "url": endpoint["url"], "incarnation": endpoint["incarnation"]}
