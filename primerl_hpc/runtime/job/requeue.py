"""Requeue the job after a save: when that is right, and how.

SLURM's walltime warning reaches the supervisor as SIGUSR2, unless the supervisor stops earlier by itself
(`walltime.py`). A preemption signals only the steps (their guards write the stop request), and the batch process when
the grace time is over. A cancelled job receives SIGTERM everywhere.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Collection, Mapping, Set
from typing import Any

from primerl_hpc.run.rundir import BUDGET, CANCEL
from primerl_hpc.runtime.step import Continuation
from primerl_hpc.slurm.command_lines import (
    queue_command,
    requeue_command,
    rows_of,
    task_name,
    update_command,
)
from primerl_hpc.slurm.commands import printable, retry_slurm, run_slurm

WALLTIME = "walltime"
"""Reason in control/stop when a run must save before its job ends."""
ALREADY_BACK = "Job is pending execution"
"""SLURM's response to a retried requeue whose first try had succeeded."""
EXCLUDE_TRIES, EXCLUDE_PAUSE_S = 20, 0.2


def decide_continuation(
    request: dict[str, Any], signals: Set[int], *, progressed: bool, is_followed: bool = False
) -> Continuation:
    """Decide whether the run continues by itself after a stopped attempt.

    ``request`` is the content of control/stop, ``signals`` are those that the supervisor received, ``is_followed`` is
    True if another job of the chain waits in the queue.
    """
    if signal.SIGTERM in signals or signal.SIGINT in signals:
        if not is_followed or request.get("reason") == CANCEL:
            return Continuation.ended()  # cancelled, or SLURM itself requeues the job
        if request.get("reason") != WALLTIME:
            return Continuation.automatic()  # this job was cancelled, not the run
    if request.get("reason") == "scheduler":
        # preempted, which is not the run's fault, however short the attempt was
        return Continuation.automatic()
    if request.get("reason") == BUDGET:
        return Continuation.ended(
            "its budget of hours is used; continue with: primerl-hpc resume RUN --budget HOURS"
        )
    if request.get("reason") != WALLTIME:
        return Continuation.ended()
    if not progressed:
        return Continuation.ended(
            "the walltime ended before a new checkpoint: another attempt of this length would end the same way"
        )
    return Continuation.automatic()


async def requeue(job_id: str, without: Collection[str] = (), *, may_poll: bool = True) -> str | None:
    """Requeue the job. Return None on success, else SLURM's output (e.g. the site forbids it, or --no-requeue).

    ``without``: hosts to exclude when the job restarts, in addition to those it excludes already. ``may_poll``: False
    where the site does not accept several questions to SLURM in a row.
    """
    excluded = await excluded_hosts(job_id) if without else {}
    name = task_name(job_id, os.environ)
    reply = await retry_slurm(*requeue_command(name))
    if reply.code and ALREADY_BACK not in reply.message:
        return reply.message or f"scontrol ended with {reply.code}"
    if without:
        await _exclude(job_id, excluded or {name: ""}, without, may_poll=may_poll)
    return None


def explain_refused_requeue(output: str) -> str:
    """Return one sentence with what SLURM printed (`requeue`) and what it means."""
    if re.search("denied|not permitted", output, re.IGNORECASE):
        why = "this site does not let users requeue their jobs"
    elif re.search("disabled", output, re.IGNORECASE):
        why = "requeue is switched off for this job (scheduler.requeue of the profile) or on this cluster"
    else:
        why = ""
    message = printable(output, separator="; ")
    return (
        f"SLURM refused to requeue the job: {why} ({message})"
        if why
        else f"SLURM refused to requeue the job: {message}"
    )


async def excluded_hosts(job_id: str) -> dict[str, str]:
    """Return the excluded hosts of each component (``7+0``, ``7+1``), job, or task of an array (``1_3``), in SLURM's
    notation, "" for none."""
    reply = await run_slurm(*queue_command(job_id, "%i", "%x"))
    rows = rows_of(job_id, reply.output, 2) if reply.code == 0 else []
    return {name: hosts.strip() for name, hosts in rows}


async def _exclude(job_id: str, before: Mapping[str, str], more: Collection[str], *, may_poll: bool) -> None:
    """Exclude hosts from the job's next start.

    SLURM allows this change only for a pending job, and a requeued job becomes pending after a moment, so this retries
    for a few seconds: no more time is left to this process. If it fails, the job may get the same hosts again, and its
    preflight then ends the run.
    """
    for _ in range(EXCLUDE_TRIES):
        is_done = True
        for job, hosts in before.items():
            names = ",".join(filter(None, [hosts, *sorted(more)]))
            reply = await run_slurm(*update_command(job, f"ExcNodeList={names}"))
            is_done = is_done and reply.code == 0
        if not may_poll:
            if is_done:
                return
            await asyncio.sleep(EXCLUDE_PAUSE_S)
            continue
        after = await excluded_hosts(job_id)
        if all(after.get(job, "") not in ("", hosts) for job, hosts in before.items()):
            return
        await asyncio.sleep(EXCLUDE_PAUSE_S)
