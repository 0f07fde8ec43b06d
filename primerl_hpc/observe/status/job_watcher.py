"""Query SLURM about many runs at once: one squeue, one sacct for jobs that squeue no longer knows, increasing pauses.

    jobs = JobWatcher()
    snapshots = [take_snapshot(run, jobs.facts_of(runs)) for run in runs]     # may be called often

Between two queries the last answer is returned. Ended jobs are not queried again. A run whose files changed is queried
soon. If SLURM does not respond, it is queried less and less often.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import RunState
from primerl_hpc.observe.status.follow_up_jobs import is_export_complete
from primerl_hpc.run.job_chain import chain_of, is_reused, jobs_of, open_links
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.commands import ask
from primerl_hpc.slurm.jobs import FORGOTTEN, JobFact, find_facts

FIRST_PAUSE_S = 2.0
LAST_PAUSE_S = 120.0
MAY_REQUEUE_S = 600.0
"""Time within which SLURM may requeue a job that lost a node, after its supervisor has written that the run failed."""


class JobWatcher:
    def __init__(
        self, ask: Callable[[list[str]], str] = ask, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask, self._clock = ask, clock
        self._facts: dict[str, JobFact] = {}
        self._reported: dict[str, object] = {}
        self._pause_s = FIRST_PAUSE_S
        self._last, self._next = -math.inf, 0.0
        self._least_s = 0.0  # ask_every_s of the runs' sites
        self.trouble: str | None = None
        """Error of the last query; None if it succeeded. The facts may be outdated if set."""

    def facts_of(self, runs: Iterable[RunDir]) -> dict[str, JobFact]:
        """Return facts by job id for the runs whose files do not show that they have ended."""
        return self.facts_of_files(
            [(read_json_or_none(run.state) or {}, read_json_or_none(run.job) or {}) for run in runs]
        )

    def facts_of_files(self, files: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, JobFact]:
        """Like `facts_of`, for runs whose state.json and job.json have been read. Observes ``ask_every_s``."""
        files = list(files)
        self._least_s = max((float(job.get("ask_every_s", 0.0)) for _, job in files), default=0.0)
        opened = [(job, open_jobs(state, job)) for state, job in files]
        facts = self.facts({number: status for _, jobs in opened for number, status in jobs.items()})
        reused = [
            number
            for job, jobs in opened
            for number in jobs.keys() & facts.keys() & set(jobs_of(job))
            if is_reused(job, facts[number].name, facts[number].submitted)
        ]
        return facts | {number: JobFact(number, FORGOTTEN) for number in reused}

    def facts(self, jobs: Mapping[str, object]) -> dict[str, JobFact]:
        """Return facts by job id. ``jobs``: id → status in the run's files (any value that changes with them)."""
        wanted = [job for job, status in jobs.items() if self._may_change(job, status)]
        if any(job not in self._reported for job in wanted):
            self._next = min(self._next, self._last + self._least_s)
        elif any(self._reported[job] != jobs[job] for job in wanted):
            self._next = min(self._next, self._last + max(FIRST_PAUSE_S, self._least_s))
            # the job's state follows soon, but may not have changed yet at the next query
            self._pause_s = FIRST_PAUSE_S / 2
        if wanted and self._clock() >= self._next:
            self._reported = dict(jobs)
            self._refresh(sorted(wanted))
        return {job: self._facts[job] for job in jobs if job in self._facts}

    def _may_change(self, job: str, status: object) -> bool:
        """True unless the job has ended and was not requeued since, which changes the run's files."""
        fact = self._facts.get(job)
        return fact is None or not fact.has_ended or self._reported.get(job) != status

    def _refresh(self, jobs: list[str]) -> None:
        before = {job: self._facts.get(job) for job in jobs}
        self._last = self._clock()
        try:
            self._facts |= find_facts(jobs, self._ask)
            self.trouble = None
        except SchedulerError as error:
            self.trouble = str(error)
        is_changed = any(self._facts.get(job) != fact for job, fact in before.items())
        self._pause_s = FIRST_PAUSE_S if is_changed else min(2 * self._pause_s, LAST_PAUSE_S)
        # jitter, so that many users' screens do not query at the same moment
        self._next = self._clock() + max(self._least_s, self._pause_s * random.uniform(0.8, 1.2))


def _age_s(state: dict[str, Any]) -> float:
    return time.time() - float(state.get("updated", 0.0))


def open_jobs(state: dict[str, Any], job: dict[str, Any]) -> dict[str, object]:
    """Return the SLURM jobs that may still change a run's state (several in a chain), with the status in its files.

    ``state``, ``job``: content of state.json and job.json. Empty if they are conclusive.
    """
    if job.get("scheduler") != "slurm":
        return {}
    written = RunState(state["state"]) if state.get("state") in set(RunState) else None
    is_final = written is not None and written.is_final and state.get("attempt", 0) >= job.get("attempt", 0)
    if is_final and (written in (RunState.DONE, RunState.STOPPED) or _age_s(state) > MAY_REQUEUE_S):
        return dict.fromkeys(_open_after(job), written) if _age_s(state) < MAY_REQUEUE_S else {}
    chain = chain_of(job)
    jobs = open_links(chain, job, state) if chain is not None else (str(job["job_id"]),)
    return dict.fromkeys((*jobs, *_open_after(job)), (written, state.get("attempt")))


def _open_after(job: dict[str, Any]) -> list[str]:
    """Return the ids of follow-up jobs without a result yet."""
    return [str(after["job_id"]) for after in job.get("after", {}).values() if not is_export_complete(after)]
