"""Scores of policy versions on environments: a row per pair, with metric names as `metrics/eval.jsonl` has them.

    {"step": 20, "environment": "held-out", "tasks": 64, "rollouts": 128, "errors": 0, "avg@2": 0.91, "pass@1": …}

A run of kind eval writes ``results/scores.jsonl``, a row when all rollouts of the pair are on disk: what has its row is
never evaluated again. Of other runs the rows are read from their evaluations during training.
"""

from __future__ import annotations

import time
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.files import append_json, read_jsonl
from primerl_hpc.common.metrics import read_steps
from primerl_hpc.common.rundir import RunDir

Scores = dict[tuple[int, str], dict[str, Any]]
_OF_THE_ROW = ("step", "environment", "time", "attempt")


def write_score(run: RunDir, step: int, environment: str, metrics: dict[str, float]) -> None:
    """``metrics``: names ``eval/<environment>/<metric>``."""
    prefix = f"eval/{environment}/"
    values = {name.removeprefix(prefix): value for name, value in metrics.items()}
    row = {"step": step, "environment": environment, "time": round(time.time(), 3), "attempt": env.attempt()}
    append_json(run.scores, {**row, **values})


def read_scores(run: RunDir) -> Scores:
    """Rows by (policy version, environment), in order of versions."""
    rows = [row for row in read_jsonl(run.scores) if {"step", "environment"} <= row.keys()]
    if not run.scores.exists():
        rows = [row for steps in read_steps(run.metrics("eval")).values() for row in _split(steps)]
    found = {(int(row["step"]), str(row["environment"])): row for row in rows}
    return dict(sorted(found.items(), key=lambda item: item[0][0]))


def metrics_of(row: dict[str, Any]) -> dict[str, Any]:
    """The row's metrics under the names that `write_score` was given."""
    return {
        f"eval/{row['environment']}/{name}": value for name, value in row.items() if name not in _OF_THE_ROW
    }


def _split(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row of metrics/eval.jsonl as one row per environment."""
    rows: dict[str, dict[str, Any]] = {}
    for name, value in row.items():
        _, _, rest = name.partition("eval/")
        label, _, metric = rest.partition("/")
        if not metric or label == "policy_version" or not name.startswith("eval/"):
            continue
        facts = {"step": row["step"], "environment": label, "time": row.get("time")}
        rows.setdefault(label, facts)[metric] = value
    return list(rows.values())
