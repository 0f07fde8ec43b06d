#!/usr/bin/env python3
"""Compare the planner's predictions with published measurements: a table of errors, and the coverage of intervals.

    tools/bench/planner_rows.py                                  # the rows of docs/measurements/planner_rows.csv
    tools/bench/planner_rows.py --rows                           # each row
    tools/bench/planner_rows.py --serving WHEEL/aiconfigurator_core/systems/silicon_sample.csv
    tools/bench/planner_rows.py --json > docs/measurements/planner_rows.json

``--serving``: all vLLM rows of the file in NVIDIA's package aiconfigurator-core. The constants of engines were fitted
on the rows of half of the models; "held out" are those of the others. Exits
with 1 if an error exceeds its floor (`FLOORS`, `planner_memory.refusals`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import ROOT, show

sys.path.insert(0, str(ROOT))
from planner_memory import held_out, kv_cases, memory_cases, not_predicted, refusals
from planner_steps import step_rows
from planner_times import (
    Case,
    after_three,
    decode_rows,
    first_token_rows,
    read,
    regime_held_out,
    serving_rows,
    summary,
    trainer_cases,
    transfer_cases,
)

ROWS = ROOT / "docs" / "measurements" / "planner_rows.csv"
FLOORS: dict[str, dict[str, float]] = {
    "decode, all": {"median": 0.12, "within_20": 0.7, "coverage_80": 0.75},
    "decode, intervals from the other models": {"coverage_80": 0.75},
    "serving, intervals from the other models": {"coverage_80": 0.75},
    "transfer, all": {"coverage_80": 0.75},
    "serving, all": {"median": 0.12, "within_20": 0.7, "coverage_80": 0.75},
    "first token, all": {"median": 0.2, "coverage_80": 0.75},
    "trainer, all": {"median": 0.09, "coverage_80": 0.75},
    "kv, all": {"median": 0.03},
    "step, all": {"median": 0.2},
    "memory, all": {"median": 0.04, "within_10": 0.9, "coverage_80": 0.75},
}
"""Largest median error, smallest share within 10 or 20 % and smallest coverage, by name of the table's line."""


def violations(result: Iterable[dict[str, Any]]) -> list[str]:
    """Return the lines of the table that miss their floor, as sentences."""
    found = []
    for line in result:
        for key, bound in FLOORS.get(line["what"], {}).items():
            is_met = line[key] <= bound if key == "median" else line[key] >= bound
            if not is_met:
                found.append(f"{line['what']}: {key} is {line[key]}, the floor is {bound}")
    return found


def tables(cases: Iterable[Case], what: str) -> list[dict[str, Any]]:
    """Return statistics of all cases, of the fitted and the held-out ones, and of each group."""
    found = list(cases)
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in found:
        groups[f"{what}: {case.group}"].append(case)
    parts = {
        f"{what}, all": found,
        f"{what}, fitted": [case for case in found if case.is_fitted],
        f"{what}, held out": [case for case in found if not case.is_fitted],
    }
    named = parts | dict(sorted(groups.items()))
    found_rows = [{"what": name} | summary(part) for name, part in named.items() if part]
    if errors := after_three(found):
        median = round(statistics.median(errors), 4)
        found_rows.insert(1, dict.fromkeys(found_rows[0], "") | _calibrated(what, errors, median))
    return found_rows


def _calibrated(what: str, errors: list[float], median: float) -> dict[str, Any]:
    """Return the statistics of a group after three of its rows were measured."""
    return {
        "what": f"{what}, after three measured rows of each group",
        "rows": len(errors),
        "median": median,
        "mean": round(statistics.fmean(errors), 4),
        "within_10": round(statistics.fmean(error <= 0.1 for error in errors), 4),
        "within_20": round(statistics.fmean(error <= 0.2 for error in errors), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--csv", type=Path, default=ROWS, help="published rows")
    parser.add_argument("--serving", type=Path, help="silicon_sample.csv of aiconfigurator-core")
    parser.add_argument(
        "--held-out", action="store_true", help="refit trainer memory without each model (30 s)"
    )
    parser.add_argument("--rows", action="store_true", help="print each row")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = read(arguments.csv)
    memory = list(memory_cases(rows))
    engines = list(decode_rows(rows))
    cases = {
        "decode": [engine.case for engine in engines],
        "first token": list(first_token_rows(rows)),
        "trainer": list(trainer_cases(rows)),
        "transfer": list(transfer_cases(rows)),
        "kv": list(kv_cases(rows)),
        "step": list(step_rows(rows)),
        "memory": [case.as_case() for case in memory if case.measured],
    }
    if arguments.held_out:
        cases["memory refitted"] = list(held_out(rows))
    if arguments.serving:
        cases["serving"] = [engine.case for engine in serving_rows(arguments.serving)]
    result = [row for kind, found in cases.items() for row in tables(found, kind)]
    for kind in cases.keys() & {"decode", "serving"}:
        number, share = regime_held_out(cases[kind])
        what = f"{kind}, intervals from the other models"
        result.append(
            dict.fromkeys(result[0], "") | {"what": what, "rows": number, "coverage_80": round(share, 4)}
        )
    if arguments.rows and not arguments.json:
        for case in sorted((case for found in cases.values() for case in found), key=lambda case: case.ratio):
            measured = f"{case.measured:10.4g} {case.predicted.unit}"
            print(f"{case.ratio:6.3f}  {measured}  {case.group:50} {case.id}")
        for row in rows:
            if row["peak_mem_gib"] and (reason := not_predicted(row)):
                print(f"  not predicted: {row['id']}: {reason}")
    show(
        "Predictions against published measurements (errors are |predicted / measured - 1|)",
        result,
        as_json=arguments.json,
    )
    if missed := violations(result) + refusals(memory):
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
