"""Back into the queue after a save: when that is right, and how.

SLURM's walltime warning reaches the supervisor as SIGUSR2, unless it sees the walltime coming itself (`walltime.py`). A
preemption reaches the steps alone (their guards make the stop request), and the batch process only when the grace is
over. A cancelled job gets SIGTERM everywhere.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Collection, Mapping, Set
from typing import Any

from primerl_hpc.runtime.allocation import insist, run_slurm

WALLTIME = "walltime"
"""The reason in control/stop of a run that must save before its job ends, whoever saw it first."""
CANCEL = "cancel"
"""The reason in control/stop of a run that people want to end."""
ALREADY_BACK = "Job is pending execution"
"""What SLURM says to the second try when it had taken the first."""
EXCLUDE_TRIES, EXCLUDE_PAUSE_S = 20, 0.2


def why_not_again(
    request: dict[str, Any], signals: Set[int], *, progressed: bool, is_followed: bool = False
) -> str | None:
    """None when a stopped attempt should go on by itself; else the reason for people ("" when they asked for it).

    ``request`` is the content of control/stop, ``signals`` what the supervisor received, ``is_followed`` whether
    another link of its chain waits in the queue.
    """
    if signal.SIGTERM in signals or signal.SIGINT in signals:
        if not is_followed or request.get("reason") == CANCEL:
            return ""  # cancelled; or SLURM itself requeues
        if request.get("reason") != WALLTIME:
            return None  # this link was cancelled, not the run
    if request.get("reason") == "scheduler":
        return None  # preempted: through no fault of its own, however short it was
    if request.get("reason") != WALLTIME:
        return ""
    if not progressed:
        return "the walltime ended before a new checkpoint: another attempt would end the same way"
    return None


async def requeue(job_id: str, without: Collection[str] = ()) -> str | None:
    """None when SLURM took it; else SLURM's words (the job was submitted with --no-requeue, the site forbids it).

    ``without``: hosts that its next life shall not get, besides those that it excludes already.
    """
    excluded = await excluded_hosts(job_id) if without else {}
    code, said = await insist("scontrol", "requeue", job_id)
    if code and ALREADY_BACK not in said:
        return said or f"scontrol ended with {code}"
    if without:
        await _exclude(job_id, excluded or {job_id: ""}, without)
    return None


async def excluded_hosts(job_id: str) -> dict[str, str]:
    """In SLURM's own notation, empty for none, by id: a heterogeneous job has one per component (``7+0``, ``7+1``)."""
    code, said = await run_slurm("squeue", "--noheader", f"--jobs={job_id}", "--format=%i %x")
    rows = [line.split(maxsplit=1) for line in said.splitlines() if line.strip()] if code == 0 else []
    return {job: hosts[0].strip() if hosts else "" for job, *hosts in rows}


async def _exclude(job_id: str, before: Mapping[str, str], more: Collection[str]) -> None:
    """SLURM lets only a waiting job change this, and it waits from a moment after its requeue.

    Tried for a few seconds, which are all that this process has left. Without success the job may get the same hosts
    again, whose preflight then ends the run.
    """
    for _ in range(EXCLUDE_TRIES):
        for job, hosts in before.items():
            names = ",".join(filter(None, [hosts, *sorted(more)]))
            await run_slurm("scontrol", "update", f"JobId={job}", f"ExcNodeList={names}")
        after = await excluded_hosts(job_id)
        if all(after.get(job, "") not in ("", hosts) for job, hosts in before.items()):
            return
        await asyncio.sleep(EXCLUDE_PAUSE_S)
