"""Jobs of a chain, seen from one of them: whether to start, whether the next one may continue the run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from primerl_hpc.common.errors import ExitCode, SchedulerError
from primerl_hpc.common.files import read_json_or_none, write_json
from primerl_hpc.common.names import RunState
from primerl_hpc.run.job_chain import JobChain, chain_of
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.files.journal import retry_run_directory
from primerl_hpc.slurm.command_lines import cancel_command, update_command
from primerl_hpc.slurm.commands import ANSWER_S, PATIENCE_S, ask, printable, retry_slurm, run_slurm
from primerl_hpc.slurm.jobs import find_facts
from primerl_hpc.slurm.sbatch import RefusedError, submit_once

NO_PROGRESS = "ended before a new checkpoint, which ends the chain"
_FINAL_CODES = (ExitCode.DATA, ExitCode.CONFIG, ExitCode.NO_CONTINUE)
"""Exit codes of faults that would recur in the next job."""

log = logging.getLogger(__name__)


def read_chain(run: RunDir, job_id: str) -> JobChain | None:
    """Return the chain that contains ``job_id``; None for a single job."""
    chain = chain_of(read_json_or_none(run.job) or {})
    return chain if chain is not None and job_id in chain.links else None


def why_not_begin(
    chain: JobChain, job_id: str, earlier: Mapping[str, Any], next_start: Mapping[str, Any] | None
) -> tuple[RunState, str] | None:
    """Return None if this job of the chain should run; else the run's state, and why the job has nothing to do.

    ``earlier`` is control/state.json of the previous attempt; ``next_start`` is where this one would start (phase and
    step), None if all phases are done.
    """
    written = earlier.get("state")
    if str(earlier.get("job_id")) not in chain.before(job_id) or written == RunState.PENDING:
        return None  # the first job of the chain, or the previous one handed over
    if RunState(written).is_final:
        return RunState(written), f"the run is {written}"
    if next_start is not None and earlier.get("began") == next_start:  # killed without progress
        return RunState.FAILED, f"{chain.place(str(earlier['job_id']))} was killed and {NO_PROGRESS}"
    return None


def why_fault_ends_chain(failure: Mapping[str, Any], *, progressed: bool) -> str | None:
    """Return None if the next job may succeed after this failure (control/failure.json), else why it would not."""
    message, code = failure.get("message") or "failed", failure.get("exit_code")
    if code in _FINAL_CODES:
        return message
    return None if progressed or code == ExitCode.BAD_NODE else f"{message}; {NO_PROGRESS}"


async def waiting_links(chain: JobChain, job_id: str) -> tuple[str, ...]:
    """Return the jobs after ``job_id`` that are still in the queue, or about which SLURM does not answer."""
    rest = chain.after(job_id)
    if not rest:
        return ()
    try:
        facts = await asyncio.to_thread(find_facts, rest, partial(ask, timeout_s=ANSWER_S))
    except SchedulerError:
        return rest
    return tuple(link for link in rest if link not in facts or not facts[link].is_over)


async def cancel_links(links: tuple[str, ...]) -> str | None:
    """Cancel jobs. Return None on success, else SLURM's output: each job then ends by itself as soon as it starts."""
    reply = await run_slurm(*cancel_command(links))
    return None if reply.code == 0 else reply.message or f"scancel ended with {reply.code}"


@dataclass(frozen=True)
class QueuedLink:
    job_id: str | None
    """None if no new job is known to be in the queue."""
    refused: str = ""
    """Why there is none."""


async def queue_next_link(run: RunDir, chain: JobChain, job_id: str) -> QueuedLink:
    """Submit a job that starts after the end of ``job_id``.

    Like `submit`, but in less time: if SLURM never answers whether it accepted the job, `resume` finds it.
    """
    folder = run.launch / "submitit"
    try:
        link, copy = await asyncio.to_thread(
            submit_once,
            run.launch / "job.sbatch",
            folder,
            [f"--dependency=afterany:{job_id}"],
            patience_s=PATIENCE_S,
            timeout_s=ANSWER_S,
            report=log.warning,
        )
    except RefusedError as error:
        output = printable(error.output, separator="; ") or "sbatch failed"
        return QueuedLink(None, f"the next job cannot be submitted from a compute node ({output})")
    except SchedulerError as error:  # SLURM did not answer: it may have accepted the job
        return QueuedLink(None, str(error))
    except OSError as error:  # a full disk, no sbatch on compute nodes
        return QueuedLink(None, f"the next job could not be submitted ({error})")
    links = [*chain.links, link]
    try:
        job = await retry_run_directory(lambda: read_json_or_none(run.job) or {})
        await retry_run_directory(lambda: write_json(run.job, {**job, "links": links}))
        copy.rename(folder / f"{link}_submission.sh")
    except OSError as error:  # the job continues the run anyway, like a job without a chain
        log.warning("Job %s continues the run, but could not be recorded in job.json: %s", link, error)
        return QueuedLink(link)
    for follow_up in job.get("after", {}).values():  # they waited for this job only, which ends unfinished
        wait = "?".join(f"afterok:{link_id}" for link_id in links)
        await retry_slurm(*update_command(follow_up["job_id"], f"Dependency={wait}"))
    return QueuedLink(link)
