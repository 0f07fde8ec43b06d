"""One supervisor per run directory: a lock file made exclusively, kept alive by its mtime.

Not flock, which some network filesystems grant to everybody. A lock is stale when its owner was on this host and is
gone, when SLURM says that the owner's job is over or runs anew, or when it was not touched for `STALE_AFTER_S`. Clocks of
hosts and file servers differ: a lock that looks stale by them alone is watched, and whoever still touches it keeps it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import OccupiedError
from primerl_hpc.common.files import create_exclusive, read_json_or_none
from primerl_hpc.common.slurm import is_job_over

STALE_AFTER_S = 90.0
TOUCH_EVERY_S = 5.0
WATCH_S = 3 * TOUCH_EVERY_S
"""How long a lock that looks stale is watched for a sign of life."""


def process_start_time(pid: int) -> str | None:
    """Start time in clock ticks since boot (field 22 of /proc/PID/stat): tells a reused pid from the old process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def is_owner_alive(owner: dict[str, Any] | None, path: Path) -> bool:
    """Whether the supervisor that wrote this lock still runs, as far as this host can tell.

    ``owner`` None: a lock that cannot be read, which somebody may be writing right now.
    """
    if owner is not None and owner.get("host") == socket.gethostname():
        started = process_start_time(int(owner["pid"]))
        return started is not None and started == owner.get("started")
    try:
        return time.time() - path.stat().st_mtime < STALE_AFTER_S
    except FileNotFoundError:
        return False


def is_owner_over(owner: dict[str, Any] | None, mine: dict[str, Any] | None = None) -> bool:
    """Whether SLURM vouches that the owner runs no more: its job's earlier life (``restart``) has ended, or its job has."""
    job = (owner or {}).get("job")
    if job is None or owner is None:
        return False
    if mine is not None and job == mine["job"]:
        return owner.get("restart") != mine["restart"]
    return is_job_over(job)


class SupervisorLock:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.mine = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": process_start_time(os.getpid()),
            "job": os.environ.get("SLURM_JOB_ID"),
            "restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
        }

    def acquire(self) -> None:
        """Raises OccupiedError naming the other supervisor's host and pid."""
        for _ in range(5):
            if create_exclusive(self.path, json.dumps(self.mine)):
                return
            owner = read_json_or_none(self.path)
            if owner is None and not self.path.exists():
                continue  # it was given back meanwhile
            is_gone = is_owner_over(owner, self.mine)
            if not is_gone and (is_owner_alive(owner, self.path) or self._is_touched(owner)):
                who = f"pid {owner['pid']} on {owner['host']}" if owner else "somebody"
                raise OccupiedError(
                    f"another supervisor ({who}) runs this run directory", place=str(self.path.parent.parent)
                )
            self._break_stale(owner)
        raise OccupiedError("the run directory's lock changes hands too fast", place=str(self.path))

    def _is_touched(self, owner: dict[str, Any] | None) -> bool:
        """Whether an owner on another host shows itself within `WATCH_S`, by no clock but this process's own."""
        if owner is not None and owner.get("host") == socket.gethostname():
            return False
        before, deadline = self._touched_at(), time.monotonic() + WATCH_S
        while time.monotonic() < deadline:
            time.sleep(0.2)
            if (now := self._touched_at()) != before:
                return now is not None
        return False

    def _touched_at(self) -> int | None:
        try:
            return self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _break_stale(self, owner: dict[str, Any] | None) -> None:
        """Remove a dead owner's lock. Only one at a time may, or the second would remove the first's new lock."""
        breaker = self.path.with_name(f".{self.path.name}.breaking")
        if not create_exclusive(breaker, str(os.getpid())):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - breaker.stat().st_mtime > STALE_AFTER_S:
                    breaker.unlink()
            time.sleep(0.2)
            return
        try:
            if read_json_or_none(self.path) == owner:
                self.path.unlink(missing_ok=True)
        finally:
            breaker.unlink(missing_ok=True)

    def touch(self) -> bool:
        """Say that we live. False when the lock is somebody else's now: a node that was thought dead came back."""
        if read_json_or_none(self.path) not in (None, self.mine):
            return False
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.path)
        return True

    def release(self) -> None:
        """One that cannot be given back is stale by itself: its owner is gone."""
        with contextlib.suppress(OSError):
            if read_json_or_none(self.path) == self.mine:
                self.path.unlink(missing_ok=True)


def is_process_alive(pid: int) -> bool:
    """Whether a process of this host runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False
