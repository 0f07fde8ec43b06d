"""Hands a run's script to sbatch, exactly once (`common/sbatch.py`), and says in the profile's words what was refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from primerl_hpc.common import sbatch
from primerl_hpc.common.sbatch import RefusedError, UnansweredError, directives_of
from primerl_hpc.launch.refusals import explain_refusal

__all__ = ["UnansweredError", "submit_copy"]

SBATCH_TIMEOUT_S = 120.0
"""sbatch itself tries for a while; after this it counts as unanswered."""
PATIENCE_S = 300.0
"""How long a SLURM that does not answer is tried again."""


def submit_copy(
    script: Path, folder: Path, options: Sequence[str] = (), *, say: Callable[[str], None]
) -> tuple[str, Path]:
    """The job's id, and the copy of ``script`` in ``folder`` that it was submitted from.

    Raises SchedulerError with the reason when SLURM refuses, UnansweredError when it never answers.
    """
    try:
        return sbatch.submit_copy(
            script, folder, options, patience_s=PATIENCE_S, timeout_s=SBATCH_TIMEOUT_S, say=say
        )
    except RefusedError as error:
        raise explain_refusal(error.said, directives_of(script.read_text())) from None
