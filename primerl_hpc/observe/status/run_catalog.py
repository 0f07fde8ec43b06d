"""All runs of this user with their states, from two small files of each unfinished run and one query to SLURM.

    listed = RunCatalog(JobWatcher()).list_runs()

States that cannot change any more are cached in the registry's index together with the stamp of the run's state.json. A
run that is restarted by hand has a different stamp, and a run that is submitted again is registered again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import RunState
from primerl_hpc.observe.status.job_watcher import MAY_REQUEUE_S, JobWatcher
from primerl_hpc.observe.status.snapshot import is_from_latest_job, real_state, unreadable_message
from primerl_hpc.run import registry
from primerl_hpc.run.registry import RegisteredRun
from primerl_hpc.run.rundir import RunDir, state_stamp
from primerl_hpc.slurm.jobs import JobFact

_ORDER = {
    RunState.RUNNING: 0,
    RunState.STARTING: 0,
    RunState.STOPPING: 0,
    RunState.SUBMITTED: 1,
    RunState.PENDING: 1,
}


@dataclass(frozen=True)
class ListedRun:
    """A registered run with its state."""

    registered: RegisteredRun
    state: RunState
    message: str | None = None
    exists: bool = True
    """False if its directory was deleted, or its filesystem is not mounted here."""

    @property
    def name(self) -> str:
        return self.registered.name

    @property
    def run(self) -> RunDir:
        return RunDir(self.registered.path)

    def as_json(self) -> dict[str, Any]:
        return {
            "run": self.name,
            "run_dir": self.registered.root,
            "submitted": self.registered.submitted,
            "state": self.state.value if self.exists else "gone",
            "message": self.message,
        }


@dataclass
class _Files:
    """The content of a run's state.json and job.json."""

    state: dict[str, Any]
    job: dict[str, Any]
    stamp: list[int] | None
    exists: bool = True

    def is_over(self, state: RunState) -> bool:
        """True if no answer of SLURM can change ``state`` any more."""
        if not state.is_final:
            return False
        if self.state.get("state") in (RunState.DONE, RunState.STOPPED) and is_from_latest_job(
            self.state, self.job
        ):
            return True
        last = max(float(self.state.get("updated", 0)), float(self.job.get("submitted", 0)))
        return time.time() - last > MAY_REQUEUE_S


class RunCatalog:
    def __init__(self, jobs: JobWatcher | None) -> None:
        """``jobs`` None: do not query SLURM."""
        self.jobs = jobs
        self.facts: Mapping[str, JobFact] = {}

    def list_runs(self) -> list[ListedRun]:
        """Return running runs first, then waiting ones, then the rest; newest first within each group."""
        runs = registry.registered_runs()
        listed, open_runs = [], []
        for registered in runs:
            stamp, memory = state_stamp(registered.root), registered.memory
            if stamp is not None and memory is not None and memory["stamp"] == stamp:
                listed.append(ListedRun(registered, RunState(memory["state"]), memory["message"]))
            else:
                run = RunDir(registered.path)
                try:
                    open_runs.append((registered, run, _read(run, stamp)))
                except OSError as error:  # must not affect other runs
                    listed.append(ListedRun(registered, RunState.UNKNOWN, unreadable_message(error)))
        if self.jobs is not None:
            self.facts = self.jobs.facts_of_files((files.state, files.job) for _, _, files in open_runs)
        memories = {}
        for registered, run, files in open_runs:
            try:
                state, message = real_state(run, files.state, files.job, self.facts)
            except OSError as error:
                listed.append(ListedRun(registered, RunState.UNKNOWN, unreadable_message(error)))
                continue
            listed.append(ListedRun(registered, state, message, files.exists))
            is_sure = self.jobs is not None and self.jobs.trouble is None
            if files.stamp is not None and is_sure and files.is_over(state):
                memories[registered.key] = {"stamp": files.stamp, "state": state.value, "message": message}
        if memories:
            registry.remember(runs, memories)
        return sorted(listed, key=lambda run: (_ORDER.get(run.state, 2), -run.registered.submitted))


def _read(run: RunDir, stamp: list[int] | None) -> _Files:
    state = (read_json_or_none(run.state) or {}) if stamp else {}
    job = read_json_or_none(run.job) or {}
    return _Files(state, job, stamp, exists=bool(state or job) or run.plan.is_file())
