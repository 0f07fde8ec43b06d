"""Metrics files (metrics/<role>.jsonl): one JSON object per step, one writer per file.

    writer = MetricsWriter(run_dir.metrics("trainer"))
    writer.write(step=3, metrics={"loss/mean": 0.12, "perf/throughput": 8123.0})

A resumed run appends. If a step has several rows, the last one is valid (`read_steps`). `high_error_rates` finds
environments whose rollouts fail for many batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.files import append_json, read_jsonl, read_last_jsonl
from primerl_hpc.common.safety.printable import one_line

HIGH_ERROR_SHARE, HIGH_ERROR_BATCHES = 0.05, 10
"""An environment is reported if its share of failed rollouts exceeds the first in each of this many batches."""
MOST_KINDS = 3
_NOT_FINITE = ("nan", "inf", "-inf")


class MetricsWriter:
    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        self.append(self.row(step, metrics))

    def row(self, step: int, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the row of a step. NaN and infinities become strings, because JSON cannot represent them."""
        clean = {name: _plain(value) for name, value in metrics.items()}
        return {"step": step, "time": round(time.time(), 3), "attempt": env.attempt(), **clean}

    def append(self, row: dict[str, Any]) -> None:
        append_json(self.path, row)


def read_steps(path: Path) -> dict[int, dict[str, Any]]:
    """Return the last row of each step, ordered by step, with the types of `with_floats`."""
    rows = {row["step"]: with_floats(row) for row in read_jsonl(path) if isinstance(row.get("step"), int)}
    return dict(sorted(rows.items()))


def read_last_steps(path: Path, count: int) -> dict[int, dict[str, Any]]:
    """Return the last ``count`` rows of the last attempt by step, reading only the end of the file.

    Steps higher than the last row's are omitted: a recovery discarded them. NaN and infinities remain text, so that the
    rows can be written as JSON.
    """
    rows = [row for row in read_last_jsonl(path, count) if isinstance(row.get("step"), int)]
    last = rows[-1] if rows else {}
    of_attempt = [row for row in rows if row.get("attempt") == last.get("attempt")]
    return {row["step"]: row for row in of_attempt if row["step"] <= last["step"]}


def with_floats(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with floats in place of the strings that `MetricsWriter` writes for NaN and infinities."""
    return {name: float(value) if value in _NOT_FINITE else value for name, value in row.items()}


@dataclass(frozen=True)
class HighErrorRate:
    """An environment of which more than `HIGH_ERROR_SHARE` of the rollouts failed in its last `HIGH_ERROR_BATCHES`."""

    environment: str
    share: float
    """Mean over these batches."""
    kinds: dict[str, int]
    """The most frequent classes of errors in these batches, and how many rollouts failed with them."""
    log: str = ""
    """Log of the environment's server."""

    @property
    def sentence(self) -> str:
        kinds = ", ".join(f"{kind} ×{count}" for kind, count in self.kinds.items())
        causes = f": {kinds}" if kinds else ""
        where = f"; see {self.log}" if self.log else ""
        return (
            f"{self.share:.0%} of the rollouts of environment {self.environment} failed in its last "
            f"{HIGH_ERROR_BATCHES} batches{causes}{where}"
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def high_error_rates(rows: Sequence[Mapping[str, Any]], logs: Mapping[str, str]) -> list[HighErrorRate]:
    """Return the environments with too many errored rollouts in each of the last batches of the orchestrator.

    ``rows``: its metrics, oldest first. A batch without rollouts of an environment does not count for it. ``logs``: the
    log of each environment.
    """
    found, prefix = list[HighErrorRate](), "errored_rollouts/"
    for name in dict.fromkeys(name for row in rows for name in row if name.startswith(prefix)):
        environment = name.removeprefix(prefix)
        own = [row for row in rows if name in row][-HIGH_ERROR_BATCHES:]
        is_high = all(row[name] > HIGH_ERROR_SHARE for row in own) and len(own) == HIGH_ERROR_BATCHES
        if environment != "all" and is_high:
            share = sum(row[name] for row in own) / len(own)
            kinds = _kinds_of(environment, rows, own[0])
            found.append(HighErrorRate(environment, share, kinds, logs.get(environment, "")))
    return found


def _kinds_of(
    environment: str, rows: Sequence[Mapping[str, Any]], first: Mapping[str, Any]
) -> dict[str, int]:
    """Return the most frequent classes of errors since the batch before ``first``.

    Rows have the number since the orchestrator's start.
    """
    prefix, last = f"failures/{environment}/", rows[-1]
    index = next(number for number, row in enumerate(rows) if row is first)
    before = rows[index - 1] if index else {}
    counts = {}
    for name in (name for name in last if name.startswith(prefix)):
        earlier = before.get(name, 0)
        counts[name.removeprefix(prefix)] = int(last[name] - (earlier if earlier <= last[name] else 0))
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return {one_line(kind): count for kind, count in ordered[:MOST_KINDS] if count > 0}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value
