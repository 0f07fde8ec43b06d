"""When would it start? ``sbatch --test-only``: SLURM's own estimate, or its refusal, and nothing is queued.

estimate_start(script)      # Estimate(start="2026-11-21T18:30:00", nodes="n[1-2]", partition="gpu", processors=128)
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass

from primerl_hpc.common.sbatch import UnansweredError, directives_of, submission_environ
from primerl_hpc.launch.refusals import explain_refusal

_SAYS = re.compile(r"to start at (\S+) using (\d+) processors on (?:nodes )?(\S+) in partition (\S+)")


@dataclass(frozen=True)
class Estimate:
    start: str
    """ISO time on the cluster's clock; backfill may be faster, and jobs with more priority slower."""
    nodes: str
    partition: str
    processors: int


def estimate_start(script: str, *, timeout_s: float) -> Estimate:
    """Raises SchedulerError with the reason when SLURM would refuse, UnansweredError when it does not say in time."""
    directives = directives_of(script)
    try:
        done = subprocess.run(
            ["sbatch", "--test-only"],
            input=script,
            env=submission_environ(os.environ, directives),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except OSError as error:
        raise UnansweredError(f"sbatch: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise UnansweredError(f"sbatch did not answer within {timeout_s:.0f} s", mend="try again") from None
    if done.returncode:
        raise explain_refusal(done.stderr or done.stdout, directives)
    if (said := _SAYS.search(done.stderr + done.stdout)) is None:
        raise UnansweredError(f"sbatch --test-only said {(done.stderr or done.stdout).strip()!r}")
    start, processors, nodes, partition = said.groups()
    return Estimate(start, nodes, partition, int(processors))
