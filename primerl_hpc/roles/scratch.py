"""A node-local folder of one process, for what cannot be in the run directory (sockets, working state of libraries)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.access.ownership import others_may_rename
from primerl_hpc.run.rundir import RunDir


def scratch_path(run: RunDir, process: str, base: str | None = None) -> Path:
    """Return ``base/primerl-<uid>-<16 hex digits>``, the same for all incarnations of the process on this host.

    ``base``: default, TMPDIR. The digits depend on the attempt's keys, so that no other user can create the folder
    first.
    """
    name = f"{run_keys(run).temporary_name}|{run.root.resolve()}|{process}|{socket.gethostname()}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return Path(base or tempfile.gettempdir()) / f"primerl-{os.getuid()}-{digest}"


@contextlib.contextmanager
def scratch_folder(run: RunDir, process: str, base: str | None = None) -> Iterator[Path]:
    """Create the folder, without content that a killed predecessor left; delete it at exit.

    It gets another name if another user created that one, which was visible while an earlier incarnation ran.
    """
    folder = scratch_path(run, process, base)
    if not others_may_rename(folder.parent):  # otherwise it may be another folder of this user
        shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        folder = Path(tempfile.mkdtemp(prefix=f"{folder.name[:-8]}-", dir=folder.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
