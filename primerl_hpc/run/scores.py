"""Scores of policy versions on environments: one row per pair, with the metric names of `metrics/eval.jsonl`.

    {"step": 20, "environment": "held-out", "tasks": 64, "rollouts": 128, "errors": 0, "avg@2": 0.91, "pass@1": …}

A run of kind eval, or of kind sft with an evaluation, writes ``results/scores.jsonl``: a row when all rollouts of a
pair are on disk, after which the pair is not evaluated again. For other runs, the rows are derived from the
evaluations during training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.files import append_json, read_jsonl, read_last_jsonl, write_text
from primerl_hpc.run.metrics import read_steps, with_floats
from primerl_hpc.run.rundir import RunDir

Scores = dict[tuple[int, str], dict[str, Any]]
LAST_ROWS = 64
"""Rows that a series reads again; more than a run writes between two looks."""
_ROW_KEYS = ("step", "environment", "time", "attempt")


def write_score(run: RunDir, step: int, environment: str, metrics: dict[str, float]) -> None:
    """Append a row. Names in ``metrics`` have the form ``eval/<environment>/<metric>``."""
    prefix = f"eval/{environment}/"
    values = {name.removeprefix(prefix): value for name, value in metrics.items()}
    row = {"step": step, "environment": environment, "time": round(time.time(), 3), "attempt": env.attempt()}
    append_json(run.scores, {**row, **values})


def read_scores(run: RunDir) -> Scores:
    """Return the rows by (policy version, environment), ordered by version."""
    rows = [row for row in read_jsonl(run.scores) if {"step", "environment"} <= row.keys()]
    if not run.scores.exists():
        rows = [row for steps in read_steps(run.metrics("eval")).values() for row in _split(steps)]
    found = {(int(row["step"]), str(row["environment"])): row for row in rows}
    return dict(sorted(found.items(), key=lambda item: item[0][0]))


def drop_scores_after(run: RunDir, step: int) -> None:
    """Remove the rows of later policy versions, which a recovered or resumed trainer produces again."""
    rows = list(read_jsonl(run.scores))
    kept = [row for row in rows if row.get("step", 0) <= step]
    if len(kept) < len(rows):
        write_text(run.scores, "".join(json.dumps(row) + "\n" for row in kept))


def is_evaluated(run: RunDir, versions: Iterable[int], environments: Iterable[str]) -> bool:
    """True if all these versions have scores on all these environments."""
    scores, labels = read_scores(run), list(environments)
    return all((version, label) in scores for version in versions for label in labels)


def metrics_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of a row with the names passed to `write_score`."""
    return {
        f"eval/{row['environment']}/{name}": value for name, value in row.items() if name not in _ROW_KEYS
    }


@dataclass
class MetricSeries:
    """Values of one metric by step, or by policy version for metrics of evaluations.

    series = MetricSeries(run, "reward/mean")
    series.refresh()                     # reads only the end of the file after the first time
    series.last(3), series.values        # ([0.7, 0.8, 0.8], {…, 12: 0.8})
    """

    run: RunDir
    metric: str
    values: dict[int, float] = field(default_factory=dict)
    source: str = ""
    """The metrics file that contains it: ``orchestrator``, ``trainer``, ``sft`` or ``eval``; empty until one does."""

    def refresh(self) -> None:
        """Read new rows. Steps that a recovery discarded are dropped when they are repeated."""
        if self.metric.startswith("eval/"):
            self.source = "eval"
            rows = [
                metrics_of(row) | {"step": version} for (version, _), row in read_scores(self.run).items()
            ]
            self._add(rows)
            return
        for source in (self.source,) if self.source else ("orchestrator", "trainer", "sft"):
            path = self.run.metrics(source)
            rows = read_last_jsonl(path, LAST_ROWS) if self.source else list(read_jsonl(path))
            if any(self.metric in row for row in rows):
                self.source = source
                self._add(rows)
                return

    def last(self, count: int) -> list[float]:
        """Return the values of the last ``count`` steps, fewer if there are fewer."""
        return [self.values[step] for step in sorted(self.values)[-count:]]

    def _add(self, rows: Iterable[dict[str, Any]]) -> None:
        previous = -1
        for row in map(with_floats, rows):
            step, value = row.get("step"), row.get(self.metric)
            if not isinstance(step, int) or not isinstance(value, int | float):
                continue
            if step <= previous and self.source != "eval":
                self.values = {known: old for known, old in self.values.items() if known < step}
            self.values[step], previous = float(value), step


def _split(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a row of metrics/eval.jsonl into one row per environment."""
    rows: dict[str, dict[str, Any]] = {}
    for name, value in row.items():
        _, _, rest = name.partition("eval/")
        label, _, metric = rest.partition("/")
        if not metric or label == "policy_version" or not name.startswith("eval/"):
            continue
        facts = {"step": row["step"], "environment": label, "time": row.get("time")}
        rows.setdefault(label, facts)[metric] = value
    return list(rows.values())
