"""The chain of jobs that execute one run one after another, as listed in control/job.json.

    {"scheduler": "slurm", "job_id": "12", "name": "toy-001", "submitted": 1767225600.0, "attempt": 1,
     "links": ["12", "13", "14"], "earlier": ["7"]}

    {…, "after": {"export": {"job_id": "15", "to": "/models/x"},
                  "evaluation": {"job_id": "16", "run_dir": "/runs/x-evaluation"}}}

``job_id`` is the first job of the last submission, ``links`` are all of its jobs (absent: a single job), ``name`` is
their name in SLURM, ``earlier`` are jobs of previous submissions, and ``after`` are the jobs that start when the run is
done. With ``"until_done": true`` each link queues the next one. The submitter writes the file; a supervisor that queues
a link adds its id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from primerl_hpc.slurm.jobs import JobFact, epoch_s

REUSED_AFTER_S = 3600.0
"""A job that SLURM received this long after the submission is another one, unless its name is the same: clocks and time
zones of machines differ by less, and a requeue counts as a submission."""


@dataclass(frozen=True)
class JobChain:
    links: tuple[str, ...]
    """Job ids in the order of execution."""
    is_until_done: bool = False

    def before(self, job_id: str | None) -> tuple[str, ...]:
        return self.links[: self.links.index(job_id)] if job_id in self.links else ()

    def after(self, job_id: str | None) -> tuple[str, ...]:
        return self.links[self.links.index(job_id) + 1 :] if job_id in self.links else ()

    def place(self, job_id: str) -> str:
        """Return ``link 2 of 5``, or ``link 2`` of a chain without a fixed length."""
        number = self.links.index(job_id) + 1
        return f"link {number}" if self.is_until_done else f"link {number} of {len(self.links)}"


def chain_of(job: Mapping[str, Any]) -> JobChain | None:
    """Return the chain in the content of control/job.json; None for a single job."""
    links = tuple(str(link) for link in job.get("links", ()))
    return JobChain(links, bool(job.get("until_done"))) if links else None


def jobs_of(job: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the jobs of the last submission in the content of control/job.json."""
    chain = chain_of(job)
    return chain.links if chain is not None else (str(job["job_id"]),) if "job_id" in job else ()


def is_reused(job: Mapping[str, Any], name: str, submitted: str) -> bool:
    """True if SLURM gave the number of this run's job to a later one: it counts from the start after its limit, and on
    a new or another cluster.

    ``job``: content of control/job.json. ``name``, ``submitted`` (ISO time): what SLURM reports about the number.
    """
    received = epoch_s(submitted)
    if received is None or received < float(job.get("submitted", received)) + REUSED_AFTER_S:
        return False
    own = job.get("name", name)
    # the allocation of `--here` is older than the run; other jobs of the run have names such as <name>-engines
    return "here" in job or not (name == own or name.startswith(f"{own}-"))


def current_job(job: Mapping[str, Any], state: Mapping[str, Any], facts: Mapping[str, JobFact]) -> str | None:
    """Return the current or next job of the run: the first link that has not ended, from the writer of ``state`` on.

    If all have ended, return the writer of ``state``. None if nothing was submitted.
    """
    chain = chain_of(job)
    if chain is None:
        return str(job["job_id"]) if job.get("job_id") is not None else None
    links = open_links(chain, job, state)
    open_ones = (link for link in links if link not in facts or not facts[link].is_over)
    return next(open_ones, links[0])


def open_links(chain: JobChain, job: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the link that wrote ``state`` and those after it, or all links if none of them has written it."""
    writer = str(state.get("job_id"))
    is_known = writer in chain.links and int(state.get("attempt", 0)) >= int(job.get("attempt", 0))
    return (writer, *chain.after(writer)) if is_known else chain.links
