"""State of the jobs that follow a run (the export, and the evaluation, which is a run itself), as shown by `status`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import RunState
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.jobs import JobFact


def follow_up_states(
    job: Mapping[str, Any], state: RunState, facts: Mapping[str, JobFact]
) -> dict[str, dict[str, Any]]:
    """Return ``{"export": {"job_id", "to", "state"}, …}``.

    ``job`` is the content of control/job.json, ``state`` the state of the run, ``facts`` the answer of SLURM.
    """
    return {
        name: {**after, "state": _state(after, state, facts.get(str(after["job_id"])))}
        for name, after in job.get("after", {}).items()
    }


def is_export_complete(after: Mapping[str, Any]) -> bool:
    """True if this is an export whose folder exists: it gets its name when it is complete."""
    return "to" in after and (folder := Path(after["to"])).is_dir() and any(folder.iterdir())


def _state(after: Mapping[str, Any], state: RunState, fact: JobFact | None) -> str:
    if is_export_complete(after):
        return "done"
    if "run_dir" in after and (written := _written_state(after["run_dir"])):
        return written
    if fact is None or fact.is_forgotten:
        return "not done" if state.is_final else "waits for this run"
    if fact.is_waiting:
        return "waits for this run" if fact.reason.startswith("Dependency") else f"pending: {fact.reason}"
    if fact.state == "CANCELLED" and state != RunState.DONE:
        return "dropped: this run did not finish"
    return "done" if fact.state == "COMPLETED" else fact.state.lower()


def state_with_parent(
    job: Mapping[str, Any], state: RunState, message: str | None
) -> tuple[RunState, str | None]:
    """Return state and message of a run that has not started; explain a dependency on the end of another run
    (``parent``).
    """
    if (parent := job.get("parent")) is None:
        return state, message
    name = Path(parent).name
    if state in (RunState.PENDING, RunState.SUBMITTED):
        is_waiting = message is None or message.startswith("Dependency")
        return state, f"waits for {name}" if is_waiting else message
    if state.is_final and _written_state(parent) != RunState.DONE:
        return RunState.CANCELLED, f"{name} did not finish, so this run never started"
    return state, message


def _written_state(run_dir: str) -> str | None:
    """Return the state last written by the supervisor of a run; None if none has started."""
    return (read_json_or_none(RunDir(Path(run_dir)).state) or {}).get("state")
