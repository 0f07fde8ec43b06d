"""Scores of policy versions as a table of 80 columns, as curves in text, and as a figure.

ENVIRONMENT          STEP   K   AVG@K  PASS@1  PASS@K  PASS^K  TASKS  ERR TOKENS
held-out             base   2   0.528   0.211   0.297   0.125     64    0    9.4
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.scores import Scores, read_scores
from primerl_hpc.observe.plot import text_plot
from primerl_hpc.observe.svg import chart_file
from primerl_hpc.observe.text import cut

_HEADER = (
    f"{'ENVIRONMENT':<18} {'STEP':>6} {'K':>3} {'AVG@K':>7} {'PASS@1':>7} {'PASS@K':>7} {'PASS^K':>7}"
    f" {'TASKS':>6} {'ERR':>4} {'TOKENS':>6}"
)
PLOT_HEIGHT = 6


def score_text(run: RunDir) -> str:
    """Table and curves; a sentence when there is nothing yet."""
    scores = read_scores(run)
    if not scores:
        return "no scores yet"
    return "\n\n".join(["\n".join(table(scores)), *plots(scores)])


def table(scores: Scores) -> list[str]:
    """A line per version, environment by environment."""
    lines = [_HEADER]
    for label in labels_of(scores):
        for row in _rows_of(scores, label):
            lines.append(_line(label, row))
    return lines


def plots(scores: Scores) -> list[str]:
    """avg@k by version, of every environment that has two or more."""
    made = []
    for label, points in curves(scores).items():
        if len(points) > 1:
            drawn = text_plot(
                [x for x, _ in points], [y for _, y in points], height=PLOT_HEIGHT, unit="version"
            )
            made.append(f"{label}, avg@{samples_of(_rows_of(scores, label)[-1])}\n{drawn}")
    return made


def write_figure(run: RunDir, path: Path) -> Path:
    """All curves in one SVG file."""
    from primerl_hpc.common.files import write_text

    write_text(path, chart_file(f"{run.root.name}: avg@k by policy version", curves(read_scores(run))))
    return path


def curves(scores: Scores) -> dict[str, list[tuple[float, float]]]:
    """environment → [(version, avg@k)]; versions without a single rollout are left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for (step, label), row in scores.items():
        if (mean := row.get(f"avg@{samples_of(row)}")) is not None:
            found.setdefault(label, []).append((float(step), float(mean)))
    return found


def labels_of(scores: Scores) -> list[str]:
    return list(dict.fromkeys(label for _, label in scores))


def samples_of(row: dict[str, Any]) -> int:
    """k of the row's avg@k; 1 where it has none."""
    return next((int(found[1]) for name in row if (found := re.fullmatch(r"avg@(\d+)", name))), 1)


def _rows_of(scores: Scores, label: str) -> list[dict[str, Any]]:
    return [row for (_, each), row in scores.items() if each == label]


def _line(label: str, row: dict[str, Any]) -> str:
    samples = samples_of(row)
    most = max((int(name[5:]) for name in row if re.fullmatch(r"pass@\d+", name)), default=1)
    names = (f"avg@{samples}", "pass@1", f"pass@{most}", f"pass^{most}")
    numbers = " ".join(f"{_number(row.get(name), 3):>7}" for name in names)
    step = "base" if row["step"] == 0 else str(row["step"])
    tokens = _number(row.get("completion_tokens/mean"), 1)
    return (
        f"{cut(label, 18):<18} {step:>6} {samples:>3} {numbers} {row.get('tasks', 0):>6.0f}"
        f" {row.get('errors', 0):>4.0f} {tokens:>6}"
    )


def _number(value: Any, decimals: int) -> str:
    return f"{value:.{decimals}f}" if isinstance(value, int | float) else "-"
