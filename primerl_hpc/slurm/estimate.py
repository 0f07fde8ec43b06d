"""Estimate a job's start with ``sbatch --test-only``: SLURM's estimate, or its refusal. Nothing is queued.

estimate_start(script)      # Estimate(start="2026-11-21T18:30:00", nodes="n[1-2]", partition="gpu", processors=128)
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from primerl_hpc.slurm.commands import NO_ANSWER, UNANSWERED, UnansweredError, printable, run_blocking
from primerl_hpc.slurm.partitions import ask_partitions
from primerl_hpc.slurm.refusals import explain_refusal
from primerl_hpc.slurm.sbatch import components_of, directives_of, submission_environ

_ESTIMATE = re.compile(r"to start at (\S+) using (\d+) processors on (?:nodes )?(\S+) in partition (\S+)")


@dataclass(frozen=True)
class Estimate:
    start: str
    """ISO time on the cluster's clock. Backfill may start the job earlier, jobs of a higher priority may delay it."""
    nodes: str
    partition: str
    processors: int


def estimate_start(script: str, *, timeout_s: float) -> Estimate:
    """Return SLURM's estimate for the text of a batch script.

    Raises SchedulerError with the reason if SLURM would refuse the job, UnansweredError if it does not answer in time.
    """
    directives = directives_of(script)
    environ = submission_environ(os.environ, directives)
    try:
        reply = run_blocking(["sbatch", "--test-only"], environ=environ, timeout_s=timeout_s, stdin=script)
    except OSError as error:
        raise UnansweredError(f"sbatch: {error.strerror}") from None
    if reply.code == NO_ANSWER:
        raise UnansweredError(f"sbatch did not answer within {timeout_s:.0f} s", hint="try again")
    if reply.code and UNANSWERED.search(reply.errors):
        raise UnansweredError(printable(reply.errors, separator="; "), hint="try again")
    if reply.code:
        raise explain_refusal(reply.errors or reply.output, components_of(script), ask_partitions)
    if (found := _ESTIMATE.search(reply.errors + reply.output)) is None:
        raise UnansweredError(
            f"sbatch --test-only printed no estimate: {(reply.errors or reply.output).strip()!r}"
        )
    start, processors, nodes, partition = found.groups()
    return Estimate(start, nodes, partition, int(processors))
