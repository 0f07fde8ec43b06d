"""Start a run from another run's checkpoint, which is imported before the job is submitted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from primerl_hpc.common.files import write_json, write_text
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import COMPLETE


def import_checkpoint(run: RunDir, recipe: Recipe) -> None:
    """Link the checkpoint that ``checkpoint.fork`` names into ``run``, its marker last; the roles then resume from it.

    Hard links if both are on one filesystem, so pruning one run does not affect the other; else copies.
    """
    fork = recipe.checkpoint.fork
    if fork is None:
        return
    assert fork.step is not None  # resolved
    source, target = RunDir(Path(fork.run)).checkpoint(fork.step), run.checkpoint(fork.step)
    shutil.copytree(
        source,
        target,
        copy_function=_link_or_copy,
        ignore=shutil.ignore_patterns(COMPLETE, "*.tmp", "FORK.json"),
    )
    write_json(run.fork_note(fork.step), {"run": fork.run, "step": fork.step, "skip": list(fork.skip)})
    write_text(target / COMPLETE, "")


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another filesystem, or one without hard links
        shutil.copy2(source, target)
