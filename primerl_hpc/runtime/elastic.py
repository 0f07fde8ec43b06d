"""Engines that live in jobs of their own, as the supervisor of the run sees them: who joined, who left, who fell silent.

Each engine's host (`engine_host.py`) touches the engine's endpoint. One that is not touched any more belongs to a lost
node: it is removed, so that the router and the fleet forget it. A host that was only slow publishes it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from primerl_hpc.common.rundir import RunDir, forget_endpoints, read_endpoint

SILENT_S = 20.0


class ElasticEngines:
    def __init__(self, run: RunDir, names: list[str]) -> None:
        self.run_dir, self.names = run, names
        self.present: dict[str, dict[str, Any]] = {}

    def changes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, ``{"state": "joined"|"left", "url", "incarnation"}``) since the last look."""
        for name in self.names:
            found = read_endpoint(self.run_dir, name)
            if found is not None and self._is_silent(name):
                forget_endpoints(self.run_dir, name)
                found = None
            before = self.present.get(name)
            if found == before:
                continue
            if before is not None:
                del self.present[name]
                yield name, _told("left", before)
            if found is not None:
                self.present[name] = found
                yield name, _told("joined", found)

    def _is_silent(self, name: str) -> bool:
        """By the file system's clock alone, which our own lock is touched by as well: clocks of nodes differ."""
        with contextlib.suppress(FileNotFoundError):
            now = self.run_dir.supervisor_lock.stat().st_mtime
            return now - self.run_dir.endpoint(name).stat().st_mtime > SILENT_S
        return False


def _told(state: str, endpoint: dict[str, Any]) -> dict[str, Any]:
    return {"state": state, "url": endpoint["url"], "incarnation": endpoint["incarnation"]}
