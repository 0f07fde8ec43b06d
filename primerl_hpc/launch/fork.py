"""A run that starts from another one's checkpoint: the checkpoint becomes its own before anything is queued."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from primerl_hpc.common.files import write_json, write_text
from primerl_hpc.common.rundir import COMPLETE, RunDir
from primerl_hpc.recipe.schema import Recipe


def import_checkpoint(run: RunDir, recipe: Recipe) -> None:
    """Link what ``checkpoint.fork`` names into ``run``, marker last; the roles then resume from it like from their own.

    Hard links where both lie on one filesystem: pruning one run takes nothing from the other. Else copies.
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
