"""Registry of the user's runs: one small file per run under the state home. All other data is in the run directory.

The registry may be lost or outdated: all commands also accept the path of a run directory. ``index.json`` is a cache of
the small files and of the final state of finished runs, so that ten thousand runs are listed in a fraction of a second.
It is rebuilt if it is missing or outdated.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.errors import NotFoundError, OccupiedError
from primerl_hpc.common.files import read_json_or_none, write_json, write_text
from primerl_hpc.run.access.ownership import check_may_enter
from primerl_hpc.run.lock import is_owner_alive
from primerl_hpc.run.rundir import RunDir

_INDEX_VERSION = 1


@dataclass(frozen=True)
class RegisteredRun:
    root: str
    """Run directory; text, because creating ten thousand Path objects is slow."""
    name: str
    submitted: float
    """Time of the last submission in seconds since the epoch."""
    key: str = ""
    """Name of the run's file in the registry."""
    stamp: int = 0
    """Modification time of that file in ns; a new submission changes it."""
    memory: dict[str, Any] | None = None
    """Cached data of a finished run; see `remember`."""

    @property
    def path(self) -> Path:
        return Path(self.root)

    @property
    def is_there(self) -> bool:
        return RunDir(self.path).plan.is_file()


def _folder() -> Path:
    return env.state_home() / "runs"


def _index() -> Path:
    return env.state_home() / "index.json"


def register_run(run: RunDir) -> None:
    """Add a run. If the home is full or read-only, print a warning and continue."""
    key = hashlib.sha256(str(run.root).encode()).hexdigest()[:16]
    entry = {"path": str(run.root), "name": run.root.name, "submitted": round(time.time(), 3)}
    try:
        write_json(_folder() / f"{key}.json", entry)
    except OSError as error:
        print(
            f"warning: {_folder()}: {error.strerror or error}: `status` will not show this run; "
            f"use its path: {run.root}",
            file=sys.stderr,
        )


def registered_runs() -> list[RegisteredRun]:
    """Return all submitted runs, newest first, including those whose directory was deleted."""
    known = _read_index()
    runs, is_new = [], False
    with contextlib.suppress(FileNotFoundError), os.scandir(_folder()) as files:
        for file in files:
            if not file.name.endswith(".json"):
                continue
            stamp = file.stat().st_mtime_ns
            entry = known.get(file.name)
            if entry is not None and entry["stamp"] == stamp:
                runs.append(_from_entry(file.name, entry))
                continue
            is_new = True
            entry = read_json_or_none(Path(file.path))
            if isinstance(entry, dict) and _is_entry(entry := {**entry, "stamp": stamp}):
                runs.append(_from_entry(file.name, entry))
    if is_new or len(runs) != len(known):
        _write_index(runs)
    return sorted(runs, key=lambda run: run.submitted, reverse=True)


def list_runs() -> list[RegisteredRun]:
    """Return the runs whose directory exists, newest first."""
    return [run for run in registered_runs() if run.is_there]


def remember(runs: Iterable[RegisteredRun], memories: dict[str, dict[str, Any]]) -> None:
    """Cache JSON objects by `RegisteredRun.key` until the run is submitted again. Best effort: the last writer wins."""
    _write_index([replace(run, memory=memories.get(run.key, run.memory)) for run in runs])


def forget_runs(runs: Iterable[RegisteredRun]) -> None:
    """Remove runs from the registry, without changing their directories."""
    for run in runs:
        (_folder() / run.key).unlink(missing_ok=True)


def find_run(word: str | None) -> RunDir:
    """Return the run given by a path, a folder of ./runs, or a name or its beginning; None: the newest run.

    Raises NotFoundError without a unique match, OccupiedError for an inaccessible directory of another user.
    """
    for path in (Path(word), env.runs_dir() / word) if word is not None else ():
        if path.is_dir():
            check_may_enter(RunDir(path.resolve()))
        if (path / "plan.json").is_file():
            return RunDir(path.resolve())
        if RunDir(path).is_unfinished:
            raise _unfinished(RunDir(path.resolve()))
    if word is not None and ("/" in word or Path(word).is_dir()):
        raise NotFoundError("no run here: plan.json is missing", location=word)
    runs = registered_runs()
    if word is None:
        newest = next((run for run in runs if run.is_there), None)
        if newest is None:
            raise NotFoundError("you have no runs", hint="start one with primerl-hpc submit")
        return RunDir(newest.path)
    named = [run for run in runs if run.name.startswith(word) and run.is_there]
    matching = [run for run in named if run.name == word] or named
    if not matching:
        raise NotFoundError(
            f"no run named '{word}'", hint="primerl-hpc status --list shows your runs; a path is accepted too"
        )
    if len(matching) > 1:
        names = ", ".join(str(run.path) for run in matching[:4])
        raise NotFoundError(f"'{word}' matches {len(matching)} runs: {names}", hint="give the path of one")
    return RunDir(matching[0].path)


def _unfinished(run: RunDir) -> NotFoundError:
    if is_owner_alive(read_json_or_none(run.submission_lock), run.submission_lock):
        cause, hint = "another process submits or deletes a run here", "try again when it has ended"
    else:
        cause = "no run here: its submission or deletion was interrupted, and no job was queued"
        hint = (
            f"submit it again with --run-dir {shlex.quote(str(run.root))}, which deletes what is left first"
        )
    return NotFoundError(cause, location=str(run.root), hint=hint)


def word_for(run: RunDir) -> str:
    """Return a word for a command line with which `find_run` finds this run: its name, or else its path, quoted."""
    try:
        is_found = find_run(run.root.name).root == run.root
    except (NotFoundError, OccupiedError):
        is_found = False
    return shlex.quote(run.root.name if is_found else str(run.root))


def _from_entry(key: str, entry: dict[str, Any]) -> RegisteredRun:
    return RegisteredRun(
        entry["path"], entry["name"], float(entry["submitted"]), key, entry["stamp"], entry.get("memory")
    )


def _read_index() -> dict[str, dict[str, Any]]:
    index = read_json_or_none(_index())
    if not isinstance(index, dict) or index.get("version") != _INDEX_VERSION:
        return {}
    runs = index.get("runs")
    return {key: entry for key, entry in runs.items() if _is_entry(entry)} if isinstance(runs, dict) else {}


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and all(isinstance(entry.get(name), str) for name in ("path", "name"))
        and all(isinstance(entry.get(name), int | float) for name in ("submitted", "stamp"))
        and isinstance(entry.get("memory", {}), dict)
    )


def _write_index(runs: Iterable[RegisteredRun]) -> None:
    """Write the cache. Errors are ignored: without it, listing runs is only slower."""
    entries = {
        run.key: {
            "path": run.root,
            "name": run.name,
            "submitted": run.submitted,
            "stamp": run.stamp,
            **({"memory": run.memory} if run.memory else {}),
        }
        for run in runs
    }
    with contextlib.suppress(OSError):
        write_text(_index(), json.dumps({"version": _INDEX_VERSION, "runs": entries}, separators=(",", ":")))
