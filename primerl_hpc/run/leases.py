"""Leases prevent step directories from being deleted while they are read. A lease is an empty file next to them.

    lease = make_lease(run.weights_step(3), "inference-0")
    held = HeldLease(lease)     # renewed by a thread, for readers that need longer than `LEASE_S`
    held.release()

Readers renew their leases. The lease of a reader that died expires.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from primerl_hpc.common.files import write_text
from primerl_hpc.common.locks import is_stale

LEASE_S = 600.0
LEASE_REFRESH_S = 120.0


def lease_path(path: Path, reader: str) -> Path:
    return path.parent / ".leases" / f"{path.name}.{reader}"


def make_lease(path: Path, reader: str) -> Path:
    """Mark ``path`` (a step directory) as being read by ``reader``. Release it with ``unlink``."""
    lease = lease_path(path, reader)
    write_text(lease, "")
    return lease


def is_leased(path: Path) -> bool:
    """True if ``path`` has a valid lease. Leases older than ``LEASE_S`` are removed: their readers died."""
    for lease in (path.parent / ".leases").glob(f"{path.name}.*"):
        if not is_stale(lease, LEASE_S):
            return True
        lease.unlink(missing_ok=True)
    return False


def renew_lease(lease: Path) -> None:
    """Renew a lease. A released lease is not created again; an I/O error is ignored, because renewals are repeated."""
    with contextlib.suppress(OSError):
        os.utime(lease)


class HeldLease:
    """A lease that is renewed until `release`, or until this process exits."""

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
