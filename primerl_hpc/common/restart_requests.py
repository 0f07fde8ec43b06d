"""Wishes for a new life of a process, made with `rundir.request_restart`, as who keeps that process alive takes them off."""

from __future__ import annotations

from typing import Any

from primerl_hpc.common.files import is_there, read_json_or_none
from primerl_hpc.common.rundir import RunDir


def take_restart_request(run_dir: RunDir, process: str, incarnation: int) -> dict[str, Any] | None:
    """The wish for a successor of this life of ``process``, taken off its place; None without one.

    One about a life that has ended is taken off too: its successor is none the worse for it.
    """
    path = run_dir.restart_request(process)
    if not is_there(path):
        return None
    asked = read_json_or_none(path) or {}
    path.unlink(missing_ok=True)
    return asked if asked.get("incarnation", incarnation) == incarnation else None
