"""The first fault of a run in words, and whether trying again can help."""

from __future__ import annotations

from typing import Any

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.observe.slurm import JobWatcher
from primerl_hpc.observe.snapshot import take_snapshot


def diagnose(run: RunDir) -> dict[str, Any]:
    snapshot = take_snapshot(run, JobWatcher().facts_of([run]))
    failure = read_json_or_none(run.failure)
    return {
        "run": snapshot.name,
        "run_dir": str(run.root),
        "state": snapshot.state.value,
        "message": snapshot.message,
        "failure": failure,
        "can_retry": can_retry(failure) if snapshot.state == RunState.FAILED else None,
        "advice": _advice(snapshot.name, snapshot.state, failure, run.latest_checkpoint()),
    }


def can_retry(failure: dict[str, Any] | None) -> bool:
    """A fault of configuration or data comes back; a crash, a signal or a lost machine may not."""
    return (failure or {}).get("exit_code") not in (ExitCode.CONFIG, ExitCode.DATA, ExitCode.NO_CONTINUE)


def _advice(name: str, state: RunState, failure: dict[str, Any] | None, checkpoint: int | None) -> str:
    after = f"after step {checkpoint}" if checkpoint else "from the beginning"
    match state:
        case RunState.FAILED if not can_retry(failure):
            return "trying again would fail again: mend the cause above, then submit anew"
        case RunState.FAILED | RunState.STOPPED | RunState.CANCELLED:
            return f"go on {after}:  primerl-hpc resume {name}"
        case RunState.DONE:
            return "nothing is wrong: the run is done"
        case RunState.UNKNOWN:
            return "it was prepared but never submitted"
    return "it is running; nothing has failed"
