"""Asks SLURM about many runs at once, politely: one squeue, one sacct for what squeue has forgotten, growing pauses.

    jobs = JobWatcher()
    snapshots = [take_snapshot(run, jobs.facts_of(runs)) for run in runs]     # as often as you like

Between two questions the last answer is given again. An ended job is not asked about again, a run whose own files
changed is asked about soon, and a SLURM that does not answer less and less often.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from primerl_hpc.common.chain import chain_of, open_links
from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.slurm import JobFact, ask, parse_sacct, parse_squeue, sacct_command, squeue_command
from primerl_hpc.observe.after import is_made

FIRST_PAUSE_S = 2.0
LAST_PAUSE_S = 120.0
MAY_REQUEUE_S = 600.0
"""SLURM puts a job of a lost node back into the queue after its supervisor said that it failed, within this time."""


class JobWatcher:
    def __init__(
        self, ask: Callable[[list[str]], str] = ask, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask, self._clock = ask, clock
        self._facts: dict[str, JobFact] = {}
        self._told: dict[str, object] = {}
        self._pause_s = FIRST_PAUSE_S
        self._last = self._next = 0.0
        self.trouble: str | None = None
        """Why the facts may be old."""

    def facts_of(self, runs: Iterable[RunDir]) -> dict[str, JobFact]:
        """Facts by job id, for the runs whose own files do not tell the end already."""
        return self.facts({job: told for run in runs for job, told in open_jobs(run).items()})

    def facts(self, jobs: Mapping[str, object]) -> dict[str, JobFact]:
        """``jobs``: id → what its run's files say (anything that changes when they do)."""
        wanted = [job for job, says in jobs.items() if self._may_change(job, says)]
        if any(job not in self._told for job in wanted):
            self._next = 0.0
        elif any(self._told[job] != jobs[job] for job in wanted):
            self._next = min(self._next, self._last + FIRST_PAUSE_S)
            # its job follows soon, and may still be as it was at the next question
            self._pause_s = FIRST_PAUSE_S / 2
        if wanted and self._clock() >= self._next:
            self._told = dict(jobs)
            self._refresh(sorted(wanted))
        return {job: self._facts[job] for job in jobs if job in self._facts}

    def _may_change(self, job: str, says: object) -> bool:
        """An ended job comes back when somebody requeues it: then its run's files say something else."""
        fact = self._facts.get(job)
        return fact is None or not fact.has_ended or self._told.get(job) != says

    def _refresh(self, jobs: list[str]) -> None:
        before = {job: self._facts.get(job) for job in jobs}
        self._last = self._clock()
        try:
            found = parse_squeue(self._ask(squeue_command(jobs)))
            if forgotten := [job for job in jobs if job not in found]:
                found |= self._from_accounting(forgotten)
            self._facts |= {job: fact for job, fact in found.items() if job in before}
            self.trouble = None
        except SchedulerError as error:
            self.trouble = str(error)
        is_changed = any(self._facts.get(job) != fact for job, fact in before.items())
        self._pause_s = FIRST_PAUSE_S if is_changed else min(2 * self._pause_s, LAST_PAUSE_S)
        # many users' screens must not ask in step
        self._next = self._clock() + self._pause_s * random.uniform(0.8, 1.2)

    def _from_accounting(self, jobs: list[str]) -> dict[str, JobFact]:
        """A cluster without accounting answers with an error: then only the run's own files know."""
        try:
            return parse_sacct(self._ask(sacct_command(jobs)))
        except SchedulerError as error:
            self.trouble = str(error)
            return {}


def _age_s(state: dict[str, Any]) -> float:
    return time.time() - float(state.get("updated", 0.0))


def open_jobs(run: RunDir) -> dict[str, object]:
    """The SLURM jobs that may still change this run's state (several of a chain), and what the run's files say of it.

    Empty when those say all there is to know.
    """
    return open_jobs_of(read_json_or_none(run.state) or {}, read_json_or_none(run.job) or {})


def open_jobs_of(state: dict[str, Any], job: dict[str, Any]) -> dict[str, object]:
    """`open_jobs` for a run whose state.json and job.json have been read."""
    if job.get("scheduler") != "slurm":
        return {}
    written = RunState(state["state"]) if state.get("state") in set(RunState) else None
    is_told = written is not None and written.is_final and state.get("attempt", 0) >= job.get("attempt", 0)
    if is_told and (written in (RunState.DONE, RunState.STOPPED) or _age_s(state) > MAY_REQUEUE_S):
        return dict.fromkeys(_open_after(job), written) if _age_s(state) < MAY_REQUEUE_S else {}
    chain = chain_of(job)
    jobs = open_links(chain, job, state) if chain is not None else (str(job["job_id"]),)
    return dict.fromkeys((*jobs, *_open_after(job)), (written, state.get("attempt")))


def _open_after(job: dict[str, Any]) -> list[str]:
    """Jobs that come after the run and left no trace of their end yet."""
    return [str(each["job_id"]) for each in job.get("after", {}).values() if not is_made(each)]
