"""Leases: nothing is deleted while somebody reads it. An empty file beside the step directories says who reads which.

    lease = make_lease(run.weights_step(3), "inference-0")
    held = HeldLease(lease)     # renewed by a thread, for whoever may read for longer than a lease lasts
    held.release()

Who still reads touches them; who has died cannot, so that an old one counts for nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

from primerl_hpc.common.files import write_text

LEASE_S = 600.0
LEASE_REFRESH_S = 120.0


def lease_path(path: Path, reader: str) -> Path:
    return path.parent / ".leases" / f"{path.name}.{reader}"


def make_lease(path: Path, reader: str) -> Path:
    """Mark ``path`` (a step directory) as being read by ``reader``; give back with ``unlink``."""
    lease = lease_path(path, reader)
    write_text(lease, "")
    return lease


def is_leased(path: Path) -> bool:
    """A lease older than ``LEASE_S`` belonged to a reader that died."""
    for lease in (path.parent / ".leases").glob(f"{path.name}.*"):
        try:
            if time.time() - lease.stat().st_mtime < LEASE_S:
                return True
            lease.unlink(missing_ok=True)
        except FileNotFoundError:
            continue
    return False


def renew_lease(lease: Path) -> None:
    """One that was given back stays away; one that cannot be touched now is touched the next time."""
    with contextlib.suppress(OSError):
        os.utime(lease)


class HeldLease:
    """Renewed until `release`, or until this process ends."""

    def __init__(self, lease: Path) -> None:
        self.lease, self._is_released = lease, threading.Event()
        self.thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self.thread.start()

    def release(self) -> None:
        self._is_released.set()
        self.lease.unlink(missing_ok=True)

    def _keep(self) -> None:
        while not self._is_released.wait(LEASE_REFRESH_S):
            renew_lease(self.lease)
