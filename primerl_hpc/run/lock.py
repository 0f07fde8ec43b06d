"""Supervisor lock of a run directory: a file created exclusively and kept alive by its modification time.

flock is not used, because some network filesystems grant it to several processes. A lock is stale if its owner ran on
this host and has exited, if SLURM reports that the owner's job has ended or was restarted, or if it was not touched
for `STALE_AFTER_S`. Because clocks of hosts and file servers differ, a lock that is stale only by its time is watched
for `WATCH_S`, and is valid if it is touched meanwhile.
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
from primerl_hpc.common.locks import is_stale, take_exclusive
from primerl_hpc.common.safety.decoding import parse_json
from primerl_hpc.common.waiting import Polling
from primerl_hpc.slurm.jobs import is_job_over

STALE_AFTER_S = 90.0
TOUCH_EVERY_S = 5.0
MOST_BYTES = 1 << 16
WATCH_S = 3 * TOUCH_EVERY_S
"""How long a lock that may be stale is watched for a touch."""


def process_start_time(pid: int) -> str | None:
    """Return the start time in clock ticks since boot (field 22 of /proc/PID/stat), which detects a reused pid."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def is_owner_alive(owner: dict[str, Any] | None, path: Path) -> bool:
    """True if the supervisor that wrote this lock still runs, as far as this host can determine.

    ``owner`` is None for an unreadable lock, which a process may be writing at this moment.
    """
    if owner is not None and owner.get("host") == socket.gethostname():
        started = process_start_time(int(owner["pid"]))
        return started is not None and started == owner.get("started")
    return not is_stale(path, STALE_AFTER_S)


def is_owner_over(owner: dict[str, Any] | None, own: dict[str, Any] | None = None) -> bool:
    """True if SLURM confirms that the owner has ended: its job has ended, or was restarted (``restart`` count)."""
    job = (owner or {}).get("job")
    if job is None or owner is None:
        return False
    if own is not None and job == own["job"]:
        return owner.get("restart") != own["restart"]
    return is_job_over(job)


class SupervisorLock:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": process_start_time(os.getpid()),
            "job": os.environ.get("SLURM_JOB_ID"),
            "restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
        }

    def acquire(self) -> None:
        """Acquire the lock. Raises OccupiedError with host and pid of the other supervisor."""
        for _ in range(5):
            if create_exclusive(self.path, json.dumps(self.identity)):
                return
            owner = read_json_or_none(self.path)
            if owner is None and not self.path.exists():
                continue  # it was released meanwhile
            has_ended = is_owner_over(owner, self.identity)
            if not has_ended and (is_owner_alive(owner, self.path) or self._is_touched(owner)):
                other = f"pid {owner['pid']} on {owner['host']}" if owner else "unknown owner"
                raise OccupiedError(
                    f"another supervisor ({other}) uses this run directory",
                    location=str(self.path.parent.parent),
                )
            self._break_stale(owner)
        raise OccupiedError(
            "the lock changed its owner five times while it was acquired", location=str(self.path)
        )

    def _is_touched(self, owner: dict[str, Any] | None) -> bool:
        """True if an owner on another host touches the lock within `WATCH_S`, measured by this process's clock."""
        if owner is not None and owner.get("host") == socket.gethostname():
            return False
        before = self._touched_at()
        for _ in Polling(WATCH_S, 0.2):
            if (now := self._touched_at()) != before:
                return now is not None
        return False

    def _touched_at(self) -> int | None:
        try:
            return self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _break_stale(self, owner: dict[str, Any] | None) -> None:
        """Remove the lock of a dead owner. A second lock file prevents two processes from doing so at the same time."""
        breaker = self.path.with_name(f".{self.path.name}.breaking")
        if not take_exclusive(breaker, STALE_AFTER_S):
            time.sleep(0.2)
            return
        try:
            if read_json_or_none(self.path) == owner:
                self.path.unlink(missing_ok=True)
        finally:
            breaker.unlink(missing_ok=True)

    def touch(self) -> bool:
        """Renew the lock. False if another supervisor owns it: this node was considered dead and has recovered."""
        try:
            fd = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return True
        try:
            if _parse(os.read(fd, MOST_BYTES)) not in (None, self.identity):
                return False
            os.utime(fd)
        finally:
            os.close(fd)
        return True

    def release(self) -> None:
        """Release the lock. An error is ignored, because the lock of an exited process is stale."""
        with contextlib.suppress(OSError):
            if read_json_or_none(self.path) == self.identity:
                self.path.unlink(missing_ok=True)


def _parse(content: bytes) -> Any | None:
    """Return the owner; None for an unreadable lock, which a process may be writing at this moment."""
    try:
        return parse_json(content.decode())
    except ValueError:
        return None


def is_process_alive(pid: int) -> bool:
    """True if a process of this host is running; False for a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def identify_process(pid: int) -> dict[str, Any]:
    """Return what distinguishes a process of this host from later ones with its number, and those of other hosts."""
    return {"host": socket.gethostname(), "started": process_start_time(pid)}


def is_local_job_alive(job: dict[str, Any]) -> bool:
    """True if the process that control/job.json names as a local run's job is running on this host."""
    pid = int(job["job_id"])
    is_other = "started" in job and {**job, **identify_process(pid)} != job
    return not is_other and is_process_alive(pid)
