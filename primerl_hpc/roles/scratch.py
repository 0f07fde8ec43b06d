"""A node-local folder of one process, for what it cannot keep in the run directory (sockets, working state of libraries)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from primerl_hpc.common.rundir import RunDir


def scratch_path(run: RunDir, process: str, base: str | None = None) -> Path:
    """``base/primerl-<uid>-<16 hex digits>``, the same for every life of the process on this host; ``base``: TMPDIR."""
    name = f"{run.root.resolve()}|{process}|{socket.gethostname()}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return Path(base or tempfile.gettempdir()) / f"primerl-{os.getuid()}-{digest}"


@contextlib.contextmanager
def scratch_folder(run: RunDir, process: str, base: str | None = None) -> Iterator[Path]:
    """Empty at first, whatever a killed predecessor left; gone at exit."""
    folder = scratch_path(run, process, base)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
