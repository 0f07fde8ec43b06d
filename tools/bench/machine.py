"""What benchmarks share: the machine and versions that each names, its table and end, the figure that is asked for, the peak of a profiled computation."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def describe_machine() -> dict[str, Any]:
    return {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}


def peak_of(profile: Any) -> int:
    """Of a `torch.profiler` run with ``profile_memory``: the highest sum of allocations still alive, in bytes."""
    alive = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def is_met(what: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> bool:
    """Print a figure beside the one that is asked for; whether it is reached."""
    asked = f"at least {at_least:g}" if at_least is not None else f"at most {at_most:g}"
    met = value >= at_least if at_least is not None else value <= at_most
    print(f"{what}: {value:.4g}; asked: {asked}: {'met' if met else 'MISSED'}")
    return met


def show(what: str, rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """A table with a column per key; with ``as_json`` one document and nothing else."""
    machine = describe_machine()
    if as_json:
        print(json.dumps({"what": what, **machine, "rows": list(rows)}, indent=1))
        return
    print(f"{what}\n{machine['machine']}, {machine['cores']} cores, Python {machine['python']}\n")
    names = list(rows[0]) if rows else []
    widths = [max(len(name), *(len(_text(row[name])) for row in rows)) for name in names]
    print("  ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True)))
    for row in rows:
        print("  ".join(f"{_text(row[name]):>{width}}" for name, width in zip(names, widths, strict=True)))


def conclude(what: str, rows: Sequence[dict[str, Any]], wrong: Sequence[str], *, as_json: bool) -> int:
    """The table and what is wrong, in sentences; returns the exit code."""
    if as_json:
        print(
            json.dumps(
                {"what": what, **describe_machine(), "rows": list(rows), "wrong": list(wrong)}, indent=1
            )
        )
    else:
        show(what, rows, as_json=False)
        print("\nwrong: " + ("; ".join(wrong) or "nothing"))
    return 1 if wrong else 0


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
