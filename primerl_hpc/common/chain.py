"""The jobs that carry one run one after another, as control/job.json lists them.

    {"scheduler": "slurm", "job_id": "12", "attempt": 1, "links": ["12", "13", "14"], "earlier": ["7"]}

    {…, "after": {"export": {"job_id": "15", "to": "/models/x"}, "evaluation": {"job_id": "16", "run_dir": "/runs/x-evaluation"}}}

``job_id`` is the first job of the last submission, ``links`` are all of it (absent: it is alone), ``earlier`` are those of
submissions before; ``after`` are the jobs that wait for the run to be done. With ``"until_done": true`` each link queues the next one itself. Written by the submitter; the
supervisor that queues a link adds its id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from primerl_hpc.common.slurm import JobFact


@dataclass(frozen=True)
class Chain:
    links: tuple[str, ...]
    """Job ids in order."""
    is_until_done: bool = False

    def before(self, job_id: str | None) -> tuple[str, ...]:
        return self.links[: self.links.index(job_id)] if job_id in self.links else ()

    def after(self, job_id: str | None) -> tuple[str, ...]:
        return self.links[self.links.index(job_id) + 1 :] if job_id in self.links else ()

    def place(self, job_id: str) -> str:
        """``link 2 of 5``; a chain that grows until the run is done has no number of links."""
        number = self.links.index(job_id) + 1
        return f"link {number}" if self.is_until_done else f"link {number} of {len(self.links)}"


def chain_of(job: Mapping[str, Any]) -> Chain | None:
    """The chain in the content of control/job.json; None for a run that is one job."""
    links = tuple(str(link) for link in job.get("links", ()))
    return Chain(links, bool(job.get("until_done"))) if links else None


def current_job(job: Mapping[str, Any], state: Mapping[str, Any], facts: Mapping[str, JobFact]) -> str | None:
    """The job that runs the run or will: from the link that wrote ``state`` on, the first that has not ended.

    When all have, the link that wrote ``state``. None when nothing was submitted.
    """
    chain = chain_of(job)
    if chain is None:
        return str(job["job_id"]) if job.get("job_id") is not None else None
    links = open_links(chain, job, state)
    return next((link for link in links if link not in facts or not facts[link].has_ended), links[0])


def open_links(chain: Chain, job: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[str, ...]:
    """The link that wrote ``state`` and those after it; all, when none of them has written yet."""
    writer = str(state.get("job_id"))
    is_ours = writer in chain.links and int(state.get("attempt", 0)) >= int(job.get("attempt", 0))
    return (writer, *chain.after(writer)) if is_ours else chain.links
