"""Which runs this user has started: one small file per run under the state home. The run directory holds the rest.

A lost or stale registry loses nothing: every command also takes the path of a run directory.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

from primerl_hpc.common import env
from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.common.files import read_json_or_none, write_json
from primerl_hpc.common.rundir import RunDir


@dataclass(frozen=True)
class RegisteredRun:
    path: Path
    name: str
    submitted: float


def _folder() -> Path:
    return env.state_home() / "runs"


def register_run(run: RunDir) -> None:
    key = hashlib.sha256(str(run.root).encode()).hexdigest()[:16]
    write_json(
        _folder() / f"{key}.json",
        {"path": str(run.root), "name": run.root.name, "submitted": round(time.time(), 3)},
    )


def list_runs() -> list[RegisteredRun]:
    """Runs whose directory still is there, newest first."""
    runs = []
    for path in _folder().glob("*.json"):
        entry = read_json_or_none(path)
        if isinstance(entry, dict) and Path(entry.get("path", "")).joinpath("plan.json").is_file():
            runs.append(RegisteredRun(Path(entry["path"]), entry["name"], float(entry["submitted"])))
    return sorted(runs, key=lambda run: run.submitted, reverse=True)


def find_run(word: str | None) -> RunDir:
    """The run that a user means: a path, one of ./runs, a directory's name or the beginning of one; None: the newest.

    Raises NotFoundError when none or several fit.
    """
    for path in (Path(word), env.runs_dir() / word) if word is not None else ():
        if (path / "plan.json").is_file():
            return RunDir(path.resolve())
    if word is not None and ("/" in word or Path(word).is_dir()):
        raise NotFoundError("no run here: plan.json is missing", place=word)
    runs = list_runs()
    if word is None:
        if not runs:
            raise NotFoundError("you have no runs yet", mend="start one with primerl-hpc submit")
        return RunDir(runs[0].path)
    exact = [run for run in runs if run.name == word]
    fitting = exact or [run for run in runs if run.name.startswith(word)]
    if not fitting:
        raise NotFoundError(f"no run called '{word}'", mend="primerl-hpc list shows yours; a path works too")
    if len(fitting) > 1:
        names = ", ".join(str(run.path) for run in fitting[:4])
        raise NotFoundError(f"'{word}' fits {len(fitting)} runs: {names}", mend="give the path of one")
    return RunDir(fitting[0].path)
