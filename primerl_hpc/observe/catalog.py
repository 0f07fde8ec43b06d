"""All runs of this user with their states: two small files of each run that is not over, one question to SLURM for all.

    briefs = Catalog(JobWatcher()).look()

What cannot change any more is remembered in the registry's index together with the stamp of the run's state.json: a
run that somebody starts again by hand has another one, and a submitted one is registered anew.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from primerl_hpc.common import registry
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import RunState
from primerl_hpc.common.registry import RegisteredRun
from primerl_hpc.common.rundir import RunDir, state_stamp
from primerl_hpc.common.slurm import JobFact
from primerl_hpc.observe.slurm import MAY_REQUEUE_S, JobWatcher, open_jobs_of
from primerl_hpc.observe.snapshot import cannot_be_read, is_of_job, real_state

_ORDER = {
    RunState.RUNNING: 0,
    RunState.STARTING: 0,
    RunState.STOPPING: 0,
    RunState.SUBMITTED: 1,
    RunState.PENDING: 1,
}


@dataclass(frozen=True)
class Brief:
    """One run in the catalog."""

    registered: RegisteredRun
    state: RunState
    message: str | None = None
    is_there: bool = True
    """False: its directory is gone, or its filesystem is not mounted here."""

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
            "state": self.state.value if self.is_there else "gone",
            "message": self.message,
        }


@dataclass
class _Files:
    """What the run's own files say."""

    state: dict[str, Any]
    job: dict[str, Any]
    stamp: list[int] | None
    is_there: bool = True

    def is_over(self, state: RunState) -> bool:
        """Whether no word of SLURM can change ``state`` any more."""
        if not state.is_final:
            return False
        if self.state.get("state") in (RunState.DONE, RunState.STOPPED) and is_of_job(self.state, self.job):
            return True
        last = max(float(self.state.get("updated", 0)), float(self.job.get("submitted", 0)))
        return time.time() - last > MAY_REQUEUE_S


class Catalog:
    def __init__(self, jobs: JobWatcher | None) -> None:
        """``jobs`` None: SLURM is not asked."""
        self.jobs = jobs
        self.facts: Mapping[str, JobFact] = {}

    def look(self) -> list[Brief]:
        """Running ones first, then those that wait, then the rest; the newest first among equals."""
        runs = registry.registered_runs()
        briefs, open_runs = [], []
        for each in runs:
            stamp = state_stamp(each.root)
            if stamp is not None and each.memory is not None and each.memory["stamp"] == stamp:
                briefs.append(Brief(each, RunState(each.memory["state"]), each.memory["message"]))
            else:
                run = RunDir(each.path)
                try:
                    open_runs.append((each, run, _read(run, stamp)))
                except OSError as error:  # of this run alone
                    briefs.append(Brief(each, RunState.UNKNOWN, cannot_be_read(error)))
        if self.jobs is not None:
            asked = [open_jobs_of(files.state, files.job) for _, _, files in open_runs]
            self.facts = self.jobs.facts({job: told for each in asked for job, told in each.items()})
        memories = {}
        for each, run, files in open_runs:
            try:
                state, message = real_state(run, files.state, files.job, self.facts)
            except OSError as error:
                briefs.append(Brief(each, RunState.UNKNOWN, cannot_be_read(error)))
                continue
            briefs.append(Brief(each, state, message, files.is_there))
            is_sure = self.jobs is not None and self.jobs.trouble is None
            if files.stamp is not None and is_sure and files.is_over(state):
                memories[each.key] = {"stamp": files.stamp, "state": state.value, "message": message}
        if memories:
            registry.remember(runs, memories)
        return sorted(briefs, key=lambda brief: (_ORDER.get(brief.state, 2), -brief.registered.submitted))


def _read(run: RunDir, stamp: list[int] | None) -> _Files:
    state = (read_json_or_none(run.state) or {}) if stamp else {}
    job = read_json_or_none(run.job) or {}
    return _Files(state, job, stamp, is_there=bool(state or job) or run.plan.is_file())
