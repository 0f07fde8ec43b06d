"""Predicted against measured figures of a run: `status`, `report` and their JSON.

The prediction is in plan.json, the measurements are in the metrics files (`run/ledger/measures.py`). A run without a
prediction, for example on CPUs, shows nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primerl_hpc.observe.text import format_count, format_duration
from primerl_hpc.run.ledger.measures import Comparison, compare
from primerl_hpc.run.metrics import read_last_steps, with_floats
from primerl_hpc.run.rundir import RunDir

WINDOW = 50
"""Last steps that are compared with the prediction."""


def compare_with_plan(run: RunDir, plan: Mapping[str, Any]) -> tuple[Comparison, ...]:
    """Return the figures of plan.json that the last steps of ``run`` measured; empty without a prediction."""
    figures = (plan.get("prediction") or {}).get("figures") or {}
    if not figures:
        return ()
    trainer = "sft" if plan.get("kind") == "sft" else "trainer"
    rows = {
        name: [with_floats(row) for row in read_last_steps(run.metrics(file), WINDOW).values()]
        for name, file in (("trainer", trainer), ("orchestrator", "orchestrator"))
    }
    return compare(figures, rows)


def format_value(value: float, unit: str) -> str:
    """Return a value with its unit: ``71.2 GiB``, ``41.3 s``, ``12k tokens/s``, ``38 %``."""
    match unit:
        case "B":
            return f"{value / 2**30:.1f} GiB"
        case "s":
            return f"{value:.2f} s" if value < 100 else format_duration(value)
        case "1":
            return f"{value:.0%}".replace("%", " %")
        case "tokens/s":
            return f"{format_count(value)} tokens/s"
        case _:
            return f"{value:.2f} {unit}"


def difference(comparison: Comparison) -> str:
    """Return the difference: ``+8 %``; in points for shares, absolute for staleness."""
    delta = comparison.measured - comparison.predicted
    if comparison.unit == "1":
        return f"{100 * delta:+.0f} points"
    if comparison.ratio is None or comparison.unit == "steps":
        return f"{delta:+.2f}"
    return f"{100 * (comparison.ratio - 1):+.0f} %"


def sentence(comparison: Comparison) -> str:
    """Return one comparison: ``step: 41.0 s predicted, 44.3 s measured (+8 %)``."""
    outside = "" if comparison.is_inside else ", outside the predicted interval"
    return (
        f"{comparison.label}: {format_value(comparison.predicted, comparison.unit)} predicted, "
        f"{format_value(comparison.measured, comparison.unit)} measured ({difference(comparison)}{outside})"
    )


def table_rows(comparisons: tuple[Comparison, ...]) -> list[tuple[str, str, str, str, str]]:
    """Return (figure, predicted, interval, measured, difference) for the report."""
    return [
        (
            comparison.label,
            format_value(comparison.predicted, comparison.unit),
            f"{format_value(comparison.low, comparison.unit)} – {format_value(comparison.high, comparison.unit)}",
            format_value(comparison.measured, comparison.unit),
            difference(comparison),
        )
        for comparison in comparisons
    ]
