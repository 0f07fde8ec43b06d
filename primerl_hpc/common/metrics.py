"""metrics/<role>.jsonl: one object per step, one writer per file. Keys are the metric names of the field.

    writer = MetricsWriter(run_dir.metrics("trainer"))
    writer.write(step=3, metrics={"loss/mean": 0.12, "perf/throughput": 8123.0})

A resumed run appends; a reader that wants one row per step takes the last one written (`read_steps`).
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.files import append_json, read_jsonl, read_last_jsonl

_NOT_FINITE = ("nan", "inf", "-inf")


class MetricsWriter:
    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """NaN and infinities are written as strings, because JSON has no word for them."""
        clean = {name: _plain(value) for name, value in metrics.items()}
        append_json(
            self.path, {"step": step, "time": round(time.time(), 3), "attempt": env.attempt(), **clean}
        )


def read_steps(path: Path) -> dict[int, dict[str, Any]]:
    """Last row per step, in order of steps, as `with_floats`. Rows written after a resume replace the ones they repeat."""
    rows = {row["step"]: with_floats(row) for row in read_jsonl(path) if isinstance(row.get("step"), int)}
    return dict(sorted(rows.items()))


def read_last_steps(path: Path, count: int) -> dict[int, dict[str, Any]]:
    """The last ``count`` rows of the attempt that wrote last, by step; however long the file is, only its end is read.

    Steps above the last row's were lost by a recovery of that attempt, and are done again.
    What is not finite stays a text: these rows go into JSON as they are.
    """
    rows = [row for row in read_last_jsonl(path, count) if isinstance(row.get("step"), int)]
    last = rows[-1] if rows else {}
    mine = [row for row in rows if row.get("attempt") == last.get("attempt")]
    return {row["step"]: row for row in mine if row["step"] <= last["step"]}


def with_floats(row: dict[str, Any]) -> dict[str, Any]:
    """A row as it was measured: NaN and infinities, which `MetricsWriter` writes as strings, are floats again."""
    return {name: float(value) if value in _NOT_FINITE else value for name, value in row.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value
