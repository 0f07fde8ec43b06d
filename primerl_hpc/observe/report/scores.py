"""Evaluation scores of policy versions as a figure. `primerl_hpc.observe.table.score_text` prints them as a table."""

from __future__ import annotations

from pathlib import Path

from primerl_hpc.common.files import write_text
from primerl_hpc.observe.report.svg import chart_file
from primerl_hpc.observe.table import score_curves
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.scores import read_scores


def write_figure(run: RunDir, path: Path) -> Path:
    """Write the curves of all environments into the SVG file ``path`` and return it."""
    title = f"{run.root.name}: avg@k by policy version"
    write_text(path, chart_file(title, score_curves(read_scores(run))))
    return path
