"""Disk space reserved so that the failure report can still be written when the filesystem or the quota is full.

The process that fills a disk notices it late, and its logs and error files are lost as well. So the supervisor reserves
two pieces at the start, one for the failure report and one for the final state, and probes the disk when a process
fails.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from pathlib import Path

from primerl_hpc.common.waiting import DISK_FULL

PIECES = 2
PIECE_BYTES = 1 << 19
PROBE_S = 5.0
"""How long `DiskReserve.why_full` waits for the filesystem."""


class DiskReserve:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._prober: threading.Thread | None = None

    def make(self) -> None:
        """Write incompressible data, which compressing filesystems count in full. No reserve on a full disk."""
        self.release()
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True)
            for piece in range(PIECES):
                (self.folder / str(piece)).write_bytes(os.urandom(PIECE_BYTES))

    def spend(self) -> None:
        """Free one piece."""
        with contextlib.suppress(OSError, StopIteration):
            next(self.folder.iterdir()).unlink(missing_ok=True)

    def release(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def why_full(self) -> str | None:
        """Return the system's error message if a small file cannot be written next to the reserve, else None.

        None as well if a busy filesystem does not answer within `PROBE_S`: the report of a failure does not wait for
        it.
        """
        answer: list[str | None] = []
        if self._prober is None or not self._prober.is_alive():
            # a daemon: neither this process nor its exit waits for a write that the kernel does not finish
            self._prober = threading.Thread(target=lambda: answer.append(self._probe()), daemon=True)
            self._prober.start()
            self._prober.join(PROBE_S)
        return answer[0] if answer else None

    def _probe(self) -> str | None:
        probe = self.folder.with_name(".probe")
        try:
            with probe.open("wb") as file:
                file.write(b"\0" * (1 << 16))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return os.strerror(error.errno) if error.errno in DISK_FULL else None
        finally:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)
        return None
