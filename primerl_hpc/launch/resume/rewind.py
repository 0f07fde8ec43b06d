"""Return a run to an earlier checkpoint: what came after it is moved to ``superseded/<time>/``; nothing is deleted.

    check_step(run, 40)
    rewind(run, plan.kind, 40)      # Rewound(steps={"checkpoints": [60, 80], …}, rows={…}, folder=…)

The next attempt then continues after step 40. An interrupted call can be repeated: it moves the rest.
"""

from __future__ import annotations

import itertools
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.common.files import parse_row, read_json_or_none, write_json
from primerl_hpc.common.names import Kind
from primerl_hpc.run.access.elsewhere import superseded_elsewhere
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import all_steps
from primerl_hpc.tracking.stream import Stream

_METRICS = {Kind.SFT: ("sft", "eval")}
_RL_METRICS = ("trainer", "orchestrator", "eval")
"""Files of the main phase; those of a warm-up phase are kept."""

_IsKept = Callable[[dict[str, Any], int], bool]
"""Called with a row and the position of its end in the file."""


@dataclass(frozen=True)
class Rewound:
    """Steps and rows that `rewind` moved to ``folder``, which is None if nothing came after the step."""

    steps: dict[str, list[int]]
    """Moved steps by kind: checkpoints, weights, deltas, rollouts."""
    rows: dict[str, int]
    """Number of moved rows by file, relative to the run directory."""
    folder: Path | None


def check_step(run: RunDir, step: int) -> None:
    """Raise NotFoundError if the run has no complete checkpoint of this step."""
    if step not in (complete := run.complete_checkpoints()):
        known = f"complete checkpoints: {', '.join(map(str, complete))}" if complete else "it has none"
        raise NotFoundError(
            f"run {shlex.quote(run.root.name)} has no complete checkpoint of step {step}",
            location=str(run.checkpoint(step)),
            hint=known,
        )


def rewind(run: RunDir, kind: Kind, step: int) -> Rewound:
    """Move everything after ``step`` out of the way. The run must not be running, and `check_step` has passed."""
    folder = _unused_folder(run)
    steps = {
        name: [number for number in all_steps(parent) if number > step]
        for name, parent in _step_folders(run).items()
    }
    files = {path: is_kept for path, is_kept in _row_files(run, kind, step).items() if path.is_file()}
    streams = _streams(run)
    offsets = [stream.sent_offsets() for stream in streams]
    splits = [_split(run, path, is_kept, folder, offsets) for path, is_kept in files.items()]
    moved_rows = {str(path.relative_to(run.root)): count for path, count in zip(files, splits, strict=True)}
    rewound = Rewound(steps, {name: count for name, count in moved_rows.items() if count}, folder)
    if not any(steps.values()) and not rewound.rows:
        return Rewound({}, {}, None)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "rewind.json", {"step": step, "steps": steps, "rows": rewound.rows})
    for name, parent in _step_folders(run).items():
        # the latest first: an interrupted call leaves a run whose latest checkpoint is complete
        for number in reversed(steps[name]):
            target = _place_for(parent, folder / name) / f"step_{number}"
            os.rename(parent / target.name, target)
    for path, count in zip(files, splits, strict=True):
        if count:
            os.replace(_kept(path), path)
    for stream, kept in zip(streams, offsets, strict=True):
        stream.rewind(kept, step)
    return rewound


def _place_for(parent: Path, place: Path) -> Path:
    """Create ``place`` for steps of ``parent``, as a link if that is on another filesystem; return it."""
    if parent.is_symlink() and not place.is_symlink():
        target = superseded_elsewhere(parent, place.parent.name) / place.name
        target.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)
    elif not parent.is_symlink():
        place.mkdir(exist_ok=True)
    return place


def _unused_folder(run: RunDir) -> Path:
    """Return a folder for this call: two calls within a second must not mix or replace what they moved."""
    name = time.strftime("%Y-%m-%dT%H-%M-%S")
    folders = (run.superseded(f"{name}-{number}" if number > 1 else name) for number in itertools.count(1))
    return next(folder for folder in folders if not folder.exists())


def _streams(run: RunDir) -> list[Stream]:
    """Return what was sent to each target of tracking."""
    states = {
        path.stem: read_json_or_none(path) or {} for path in run.tracker_state("any").parent.glob("*.json")
    }
    streams = [
        Stream(run, name, tuple(state.get("offsets", {})), None) for name, state in sorted(states.items())
    ]
    for stream in streams:
        stream.restore(None)
    return streams


def _step_folders(run: RunDir) -> dict[str, Path]:
    return {
        "checkpoints": run.checkpoints,
        "weights": run.weights,
        "deltas": run.deltas,
        "rollouts": run.rollouts,
    }


def _row_files(run: RunDir, kind: Kind, step: int) -> dict[Path, _IsKept]:
    """Return the files with rows, and for each the test of a row that belongs to the run up to ``step``."""

    def by_step(row: dict[str, Any], end: int) -> bool:
        return not isinstance(number := row.get("step"), int) or number <= step

    def by_version(row: dict[str, Any], end: int) -> bool:
        return not isinstance(number := row.get("eval_version", row.get("version")), int) or number <= step

    files = {run.metrics(name): by_step for name in _METRICS.get(kind, _RL_METRICS)}
    files |= {run.scores: by_step, run.traces("eval"): by_version}
    state = read_json_or_none(run.checkpoint_side(step, "orchestrator") / "state.json") or {}
    if isinstance(size := state.get("traces_bytes"), int):
        files[run.traces("train")] = lambda row, end: end <= size  # the orchestrator continues at this size
    return files


def _kept(path: Path) -> Path:
    return path.with_name(f"{path.name}.rewind.tmp")


def _split(run: RunDir, path: Path, is_kept: _IsKept, folder: Path, offsets: list[dict[str, int]]) -> int:
    """Write the kept rows to a temporary file and the others below ``folder``; return the number of the others.

    ``offsets``: bytes of each metrics file that were sent to a target of tracking; adapted to the kept rows.
    """
    name = path.stem if path.parent == run.metrics("any").parent else ""
    position = moved = 0
    sent = [0] * len(offsets)
    target = folder / path.relative_to(run.root)
    with path.open("rb") as rows, _kept(path).open("wb") as kept:
        others = None
        for line in rows:
            position += len(line)
            if is_kept(parse_row(line) or {}, position):
                kept.write(line)
                for index, known in enumerate(offsets):
                    sent[index] += len(line) if position <= known.get(name, 0) else 0
                continue
            if others is None:
                target.parent.mkdir(parents=True, exist_ok=True)
                others = target.open("wb")
            others.write(line)
            moved += 1
        for file in (kept, others):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
        if others is not None:
            others.close()
    if not moved:
        _kept(path).unlink()
    else:
        for known, count in zip(offsets, sent, strict=True):
            if name in known:
                known[name] = count
    return moved
