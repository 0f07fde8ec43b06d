"""Quotas of the user on the filesystem of a folder: ``lfs quota`` on Lustre, ``quota`` elsewhere, where installed.

for quota in quotas_of(folder):       # of the user and of the group
    quota.describe()                  # "user alice: 930 of 1,024 GiB, 88,000 of 1,000,000 files"
"""

from __future__ import annotations

import getpass
import grp
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from primerl_hpc.common.locks import filesystem_of

LIMIT_S = 20.0
NEARLY_FULL = 0.9
_GIB_OF_KIB = 2**20


@dataclass(frozen=True)
class Quota:
    holder: str
    """``user alice``, ``group physics``"""
    used_kib: int
    limit_kib: int
    """0: unlimited."""
    used_files: int
    limit_files: int

    @property
    def share(self) -> float:
        """Used part of the limit of bytes or files, whichever is larger."""
        pairs = ((self.used_kib, self.limit_kib), (self.used_files, self.limit_files))
        return max((used / limit for used, limit in pairs if limit), default=0.0)

    def describe(self) -> str:
        size = f"{self.used_kib / _GIB_OF_KIB:,.0f}"
        size += f" of {self.limit_kib / _GIB_OF_KIB:,.0f} GiB" if self.limit_kib else " GiB"
        files = f"{self.used_files:,}" + (f" of {self.limit_files:,}" if self.limit_files else "")
        return f"{self.holder}: {size}, {files} files"


def quotas_of(folder: Path) -> list[Quota]:
    """Return the quotas with a limit; none if the filesystem or this machine does not report them."""
    user, group = getpass.getuser(), _group()
    holders = [("user", "-u", user)] + ([("group", "-g", group)] if group else [])
    if "lustre" in (filesystem_of(folder) or "") and shutil.which("lfs"):
        commands = [["lfs", "quota", "-q", flag, name, str(folder)] for _, flag, name in holders]
    elif shutil.which("quota"):
        # -w: no line breaks; -p: grace times as numbers, so that no column is empty
        commands = [["quota", "-w", "-p", flag, name] for _, flag, name in holders]
    else:
        return []
    mount = _mount_of(folder)
    found = [
        parse_quota(_output(command), f"{kind} {name}", mount)
        for command, (kind, _, name) in zip(commands, holders, strict=True)
    ]
    return [quota for quota in found if quota is not None and (quota.limit_kib or quota.limit_files)]


def parse_quota(text: str, holder: str, mount: str) -> Quota | None:
    """Return the quota in the output of ``lfs quota -q`` or ``quota -w -p``; None without one for this filesystem.

    A row: filesystem, KiB, soft and hard limit, grace time, files, soft and hard limit, grace time. A ``*`` marks an
    exceeded value. lfs breaks the line after a long path. The soft limit counts, if there is one.
    """
    row = re.compile(
        r"^\s*(\S+)\s+(\d+)\*?\s+(\d+)\s+(\d+)\s+(\S+)\s+(\d+)\*?\s+(\d+)\s+(\d+)\s+\S+\s*$", re.MULTILINE
    )
    joined = re.sub(r"^(\s*/\S+)\s*\n", r"\1 ", text, flags=re.MULTILINE)
    for name, used, soft, hard, _, files, soft_files, hard_files in row.findall(joined):
        if name in _sources_of(mount):
            limits = int(soft) or int(hard), int(soft_files) or int(hard_files)
            return Quota(holder, int(used), limits[0], int(files), limits[1])
    return None


def _sources_of(mount: str) -> set[str]:
    """Return the names of a filesystem in reports: its mount point, and its device or server."""
    names = {mount}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, where = line.split()[:2]
        if where == mount:
            names.add(device)
    return names


def _mount_of(folder: Path) -> str:
    path = folder.resolve()
    return str(next(parent for parent in (path, *path.parents) if os.path.ismount(parent)))


def _output(command: Sequence[str]) -> str:
    """Return what the command printed; quota exits with 1 if a limit is exceeded."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _group() -> str | None:
    try:
        return grp.getgrgid(os.getgid()).gr_name
    except KeyError:
        return None
