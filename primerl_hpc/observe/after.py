"""What comes after a run, as `status` shows it: the export's folder, and the evaluation, a run of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.slurm import JobFact


def after_states(
    job: Mapping[str, Any], state: RunState, facts: Mapping[str, JobFact]
) -> dict[str, dict[str, Any]]:
    """``{"export": {"job_id", "to", "state"}, …}`` from control/job.json, the run's own state, and what SLURM said."""
    return {
        name: {**each, "state": _state(each, state, facts.get(str(each["job_id"])))}
        for name, each in job.get("after", {}).items()
    }


def is_made(after: Mapping[str, Any]) -> bool:
    """Whether the folder of an export is there: it is renamed when it is whole."""
    folder = Path(after.get("to", "/nowhere"))
    return folder.is_dir() and any(folder.iterdir())


def _state(after: Mapping[str, Any], state: RunState, fact: JobFact | None) -> str:
    if is_made(after):
        return "done"
    if "run_dir" in after and (written := _written_state(after["run_dir"])):
        return written
    if fact is None:
        return "not done" if state.is_final else "waits for this run"
    if fact.is_waiting:
        return "waits for this run" if fact.reason.startswith("Dependency") else f"pending: {fact.reason}"
    if fact.state == "CANCELLED" and state != RunState.DONE:
        return "dropped: this run did not finish"
    return "done" if fact.state == "COMPLETED" else fact.state.lower()


def of_parent(job: Mapping[str, Any], state: RunState, message: str | None) -> tuple[RunState, str | None]:
    """What it means that a job which waits for another run's end (``parent``) has not started."""
    if (parent := job.get("parent")) is None:
        return state, message
    name = Path(parent).name
    if state in (RunState.PENDING, RunState.SUBMITTED):
        is_waiting = message is None or message.startswith("Dependency")
        return state, f"waits for {name}" if is_waiting else message
    if state.is_final and _written_state(parent) != RunState.DONE:
        return RunState.CANCELLED, f"{name} did not finish, so this was never started"
    return state, message


def _written_state(run_dir: str) -> str | None:
    """What the supervisor of a run wrote last; None when none has started."""
    return (read_json_or_none(RunDir(Path(run_dir)).state) or {}).get("state")
