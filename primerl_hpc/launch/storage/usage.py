"""Size of a run directory by kind of file.

usage = measure_run(run)
usage.parts["checkpoints"].size_bytes, usage.total.num_files
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from primerl_hpc.common.errors import OccupiedError
from primerl_hpc.run.access.elsewhere import files_of_run
from primerl_hpc.run.access.ownership import check_may_enter, user_name
from primerl_hpc.run.rundir import RunDir

PARTS = ("checkpoints", "weights", "deltas", "rollouts", "traces", "logs", "metrics", "code", "superseded")
"""Folders that are counted separately, also those of a warm-up; everything else is ``other``."""
OTHER = "other"


@dataclass
class Amount:
    size_bytes: int = 0
    num_files: int = 0

    def add(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self.num_files += 1


@dataclass
class RunUsage:
    """``parts``: amounts by the names of `PARTS` and `OTHER`. A file with several names counts once."""

    parts: dict[str, Amount] = field(default_factory=dict)

    @property
    def total(self) -> Amount:
        amounts = self.parts.values()
        return Amount(sum(part.size_bytes for part in amounts), sum(part.num_files for part in amounts))

    def as_json(self) -> dict[str, dict[str, int]]:
        return {name: vars(part) for name, part in {**self.parts, "total": self.total}.items()}


def check_is_mine(run: RunDir) -> None:
    """Raise OccupiedError if the run directory belongs to another user."""
    check_may_enter(run)
    uid = run.root.stat().st_uid
    if uid != os.geteuid():
        raise OccupiedError(
            f"this run belongs to {user_name(uid)}", location=str(run.root), hint="only its owner can do this"
        )


def measure_run(run: RunDir) -> RunUsage:
    """Return the size of all files of the run, also of parts in other folders (`run.access.elsewhere`).

    Other symbolic links are not followed. Raises OccupiedError.
    """
    check_is_mine(run)
    usage = RunUsage()
    for path, size_bytes in sizes_of(files_of_run(run)):
        usage.parts.setdefault(_part_of(path.relative_to(run.root)), Amount()).add(size_bytes)
    return usage


def sizes_of(files: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    """Yield every file with its size in bytes; a file with several names is yielded once."""
    seen = set[tuple[int, int]]()
    for path in files:
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue  # a running run deletes files
        if found.st_nlink > 1:
            if (identity := (found.st_dev, found.st_ino)) in seen:
                continue
            seen.add(identity)
        yield path, found.st_size


def _part_of(path: Path) -> str:
    return next((name for name in path.parent.parts[:2] if name in PARTS), OTHER)


def format_bytes(size_bytes: float) -> str:
    """Return ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size_bytes < 1024 or unit == "TiB":
            break
        size_bytes /= 1024
    return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
