"""The links of a chain, seen from one of them: may I begin, may another one go on, and what SLURM is asked to do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from primerl_hpc.common.chain import Chain, chain_of
from primerl_hpc.common.errors import ExitCode, SchedulerError
from primerl_hpc.common.files import read_json_or_none, write_json
from primerl_hpc.common.names import RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.sbatch import RefusedError, submit_copy
from primerl_hpc.common.slurm import ask, parse_squeue, squeue_command
from primerl_hpc.runtime.allocation import ANSWER_S, PATIENCE_S, insist, run_slurm
from primerl_hpc.runtime.journal import patiently

NO_PROGRESS = "ended before a new checkpoint: another attempt would end the same way"
_KEEP_ENDING = (ExitCode.DATA, ExitCode.CONFIG, ExitCode.NO_CONTINUE)
"""Codes of a fault that the next link would meet again."""

log = logging.getLogger(__name__)


def read_chain(run: RunDir, job_id: str) -> Chain | None:
    """The chain that ``job_id`` is a link of; None for a job that stands alone."""
    chain = chain_of(read_json_or_none(run.job) or {})
    return chain if chain is not None and job_id in chain.links else None


def why_not_begin(
    chain: Chain, mine: str, earlier: Mapping[str, Any], begins: Mapping[str, Any] | None
) -> tuple[RunState, str] | None:
    """None when this link should go on with the run; else the run's state, and why it has nothing to do.

    ``earlier`` is control/state.json of the attempt before; ``begins`` is where this one would begin (phase and step),
    None when every phase is done.
    """
    written = earlier.get("state")
    if str(earlier.get("job_id")) not in chain.before(mine) or written == RunState.PENDING:
        return None  # the first link, or handed over by the one before
    if RunState(written).is_final:
        return RunState(written), f"the run is {written}"
    if begins is not None and earlier.get("began") == begins:  # killed, and for nothing
        return RunState.FAILED, f"{chain.place(str(earlier['job_id']))} was killed and {NO_PROGRESS}"
    return None


def why_fault_ends_chain(failure: Mapping[str, Any], *, progressed: bool) -> str | None:
    """None when the next link may do better after this fault (control/failure.json)."""
    message, code = failure.get("message") or "failed", failure.get("exit_code")
    if code in _KEEP_ENDING:
        return message
    return None if progressed or code == ExitCode.BAD_NODE else f"{message}; {NO_PROGRESS}"


async def waiting_links(chain: Chain, mine: str) -> tuple[str, ...]:
    """Links after ``mine`` that are still in the queue; all of them when SLURM does not say."""
    rest = chain.after(mine)
    if not rest:
        return ()
    try:
        facts = parse_squeue(await asyncio.to_thread(ask, squeue_command(rest), ANSWER_S))
    except SchedulerError:
        return rest
    return tuple(link for link in rest if link in facts and not facts[link].has_ended)


async def cancel_links(links: tuple[str, ...]) -> str | None:
    """None when they are out of the queue, else SLURM's words: each then ends by itself as soon as it starts."""
    code, said = await run_slurm("scancel", *links)
    return None if code == 0 else said or f"scancel ended with {code}"


async def queue_next_link(run: RunDir, chain: Chain, mine: str) -> tuple[str | None, str]:
    """(job id, "") of a new link that waits for the end of ``mine``; (None, why) when none is known to.

    Queued as by `submit`, in less time: where SLURM never says whether it took the link, `resume` finds it.
    """
    folder = run.launch / "submitit"
    try:
        link, copy = await asyncio.to_thread(
            submit_copy,
            run.launch / "job.sbatch",
            folder,
            [f"--dependency=afterany:{mine}"],
            patience_s=PATIENCE_S,
            timeout_s=ANSWER_S,
            say=log.warning,
        )
    except RefusedError as error:
        said = error.said.strip() or "sbatch failed"
        return None, f"the next job cannot be queued from a compute node ({said})"
    except SchedulerError as error:  # SLURM was silent: it may have taken the job
        return None, str(error)
    except OSError as error:  # a full disk, no sbatch on compute nodes
        return None, f"the next job could not be queued ({error})"
    links = [*chain.links, link]
    try:
        job = await patiently(lambda: read_json_or_none(run.job) or {})
        await patiently(lambda: write_json(run.job, {**job, "links": links}))
        copy.rename(folder / f"{link}_submission.sh")
    except OSError as error:  # it goes on with the run all the same, as a job that stands alone
        log.warning("job %s is queued to go on with the run, and could not be noted: %s", link, error)
        return link, ""
    for after in job.get("after", {}).values():  # they waited for this job alone, which ends unfinished
        wait = "?".join(f"afterok:{each}" for each in links)
        await insist("scontrol", "update", f"JobId={after['job_id']}", f"Dependency={wait}")
    return link, ""
