"""Space for last words: files in the run directory that are given back when its filesystem is full or the quota used up.

Whoever fills a disk first sees it late: logs and error files of the dying role are lost too. So the supervisor keeps
two pieces from the start, one for the first fault and one for the end, and probes when a process fails.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from primerl_hpc.common.patience import FULL

PIECES = 2
PIECE_BYTES = 1 << 19


class Reserve:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> None:
        """Not compressible, so that it counts on filesystems that compress. A disk that is full now stays without."""
        self.release()
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True)
            for piece in range(PIECES):
                (self.folder / str(piece)).write_bytes(os.urandom(PIECE_BYTES))

    def spend(self) -> None:
        """Give one piece back."""
        with contextlib.suppress(OSError, StopIteration):
            next(self.folder.iterdir()).unlink(missing_ok=True)

    def release(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def why_full(self) -> str | None:
        """The system's words when a small file cannot be written beside it, else None."""
        probe = self.folder.with_name(".probe")
        try:
            with probe.open("wb") as file:
                file.write(b"\0" * (1 << 16))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return os.strerror(error.errno) if error.errno in FULL else None
        finally:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)
        return None
