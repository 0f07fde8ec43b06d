"""The links of a chain, seen from one of them: may I begin, may another one go on, and what SLURM is asked to do."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from primerl_hpc.common.chain import Chain, chain_of
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json_or_none, write_json
from primerl_hpc.common.names import RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.slurm import parse_squeue, squeue_command
from primerl_hpc.runtime.allocation import run_slurm

NO_PROGRESS = "ended before a new checkpoint: another attempt would end the same way"
_KEEP_ENDING = (ExitCode.DATA, ExitCode.CONFIG, ExitCode.NO_CONTINUE)
"""Codes of a fault that the next link would meet again."""

_JOB_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_")
_CLIENT_SETTINGS = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")


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
    code, said = await run_slurm(*squeue_command(rest))
    if code != 0:
        return rest
    facts = parse_squeue(said)
    return tuple(link for link in rest if link in facts and not facts[link].has_ended)


async def cancel_links(links: tuple[str, ...]) -> str | None:
    """None when they are out of the queue, else SLURM's words: each then ends by itself as soon as it starts."""
    code, said = await run_slurm("scancel", *links)
    return None if code == 0 else said or f"scancel ended with {code}"


async def queue_next_link(run: RunDir, chain: Chain, mine: str) -> tuple[str | None, str]:
    """(job id, "") of a new link that waits for the end of ``mine``; (None, SLURM's words) when it was refused."""
    # what this job was given must not become what the next one asks for
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_JOB_PREFIXES) or name in _CLIENT_SETTINGS
    }
    script = str(run.launch / "job.sbatch")
    command = ("sbatch", f"--dependency=afterany:{mine}", script)
    code, said = await run_slurm(*command, environment=inherited)
    match = re.search(r"Submitted batch job (\d+)", said)
    if code != 0 or match is None:
        return None, said or f"sbatch ended with {code}"
    job, links = read_json_or_none(run.job) or {}, [*chain.links, match[1]]
    write_json(run.job, {**job, "links": links})
    for after in job.get("after", {}).values():  # they waited for this job alone, which ends unfinished
        wait = "?".join(f"afterok:{link}" for link in links)
        await run_slurm("scontrol", "update", f"JobId={after['job_id']}", f"Dependency={wait}")
    return match[1], ""
