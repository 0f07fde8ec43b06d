"""Tables for a terminal of 80 columns, by rich; and the table of scores, which several commands show.

    table = make_table(column("RUN", 29), column("AGE", 5, is_number=True))
    table.add_row(cell("math-001"), cell("3h"))
    lines = render(table)

Lines contain ANSI colors; `click.echo` removes them if the output is not a terminal. These functions are not in text.py
because rich takes a tenth of a second to import.
"""

from __future__ import annotations

import io
import re
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from primerl_hpc.common.safety.terminal import plain
from primerl_hpc.observe.plot import text_plot
from primerl_hpc.observe.text import WIDTH
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.scores import Scores, read_scores

SCORE_PLOT_HEIGHT = 6


def make_table(*columns: Column, has_header: bool = True) -> Table:
    """Return a table without borders whose columns are one blank apart."""
    return Table(
        *columns,
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        collapse_padding=True,
        show_header=has_header,
        header_style="",
    )


def column(header: str, width: int | None = None, *, is_number: bool = False) -> Column:
    """Return a column that never wraps: longer cells end with an ellipsis. ``width`` None: as wide as its cells."""
    return Column(
        header, justify="right" if is_number else "left", width=width, no_wrap=True, overflow="ellipsis"
    )


def cell(text: str, color: str = "") -> Text:
    """Return ``text`` as a table cell. Square brackets in it are not interpreted as markup."""
    return Text(plain(text), style=color)


def render(renderable: RenderableType, width: int = WIDTH) -> list[str]:
    """Return the lines of a table in at most ``width`` columns, with ANSI colors and without trailing blanks."""
    output = io.StringIO()
    console = Console(
        file=output,
        width=width,
        force_terminal=True,
        force_interactive=False,
        color_system="standard",
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(renderable)
    return [line.rstrip() for line in output.getvalue().splitlines()]


# -- scores ----------------------------------------------------------------------------------------


def score_text(run: RunDir) -> str:
    """Return the table of the run's scores and their curves, or a sentence if there are none.

    ENVIRONMENT         STEP   K   AVG@K  PASS@1  PASS@K  PASS^K  TASKS  ERR  TOKENS
    held-out            base   2   0.528   0.211   0.297   0.125     64    0     9.4
    """
    scores = read_scores(run)
    if not scores:
        return "no scores yet"
    return "\n\n".join(["\n".join(score_table(scores)), *_score_plots(scores)])


def score_table(scores: Scores) -> list[str]:
    """Return a header and one line per environment and policy version, grouped by environment."""
    numbers = (("STEP", 6), ("K", 3), ("AVG@K", 7), ("PASS@1", 7), ("PASS@K", 7), ("PASS^K", 7))
    counts = (("TASKS", 6), ("ERR", 4), ("TOKENS", 7))
    table = make_table(
        column("ENVIRONMENT", 17),
        *(column(name, width, is_number=True) for name, width in (*numbers, *counts)),
    )
    for label in dict.fromkeys(label for _, label in scores):
        for row in _rows_of_label(scores, label):
            table.add_row(*map(cell, _score_cells(label, row)))
    return [*render(table), *_limit_lines(scores)]


def _limit_lines(scores: Scores) -> list[str]:
    """Return a line for each score that counts rollouts as unsolved because they reached a limit."""
    lines = []
    for (step, label), row in scores.items():
        k = _num_samples(row)
        if row.get("limited"):
            finished = _format_decimal(row.get(f"avg_finished@{k}"), 3)
            lines.append(
                f"{label}, version {step}: avg@{k} {_format_decimal(row.get(f'avg@{k}'), 3)}, {finished} without "
                f"{row['limited']:.0f} that reached a limit"
            )
    return lines


def score_curves(scores: Scores) -> dict[str, list[tuple[float, float]]]:
    """Return {environment: [(version, avg@k)]}, without versions for which every rollout failed."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for (step, label), row in scores.items():
        if (mean := row.get(f"avg@{_num_samples(row)}")) is not None:
            curves.setdefault(label, []).append((float(step), float(mean)))
    return curves


def _score_plots(scores: Scores) -> list[str]:
    """Return a plot of avg@k by version for every environment with at least two versions."""
    plots = []
    for label, points in score_curves(scores).items():
        if len(points) > 1:
            steps, means = [x for x, _ in points], [y for _, y in points]
            plot = text_plot(steps, means, height=SCORE_PLOT_HEIGHT, unit="version")
            plots.append(f"{label}, avg@{_num_samples(_rows_of_label(scores, label)[-1])}\n{plot}")
    return plots


def _format_decimal(value: Any, decimals: int) -> str:
    return f"{value:.{decimals}f}" if isinstance(value, int | float) else "-"


def _score_cells(label: str, row: dict[str, Any]) -> list[str]:
    samples = _num_samples(row)
    most = max((int(name[5:]) for name in row if re.fullmatch(r"pass@\d+", name)), default=1)
    names = (f"avg@{samples}", "pass@1", f"pass@{most}", f"pass^{most}")
    return [
        label,
        "base" if row["step"] == 0 else str(row["step"]),
        str(samples),
        *(_format_decimal(row.get(name), 3) for name in names),
        f"{row.get('tasks', 0):.0f}",
        f"{row.get('errors', 0):.0f}",
        _format_decimal(row.get("completion_tokens/mean"), 1),
    ]


def _rows_of_label(scores: Scores, label: str) -> list[dict[str, Any]]:
    return [row for (_, row_label), row in scores.items() if row_label == label]


def _num_samples(row: dict[str, Any]) -> int:
    """Return the k of the row's avg@k; 1 if the row has none."""
    return next((int(found[1]) for name in row if (found := re.fullmatch(r"avg@(\d+)", name))), 1)
