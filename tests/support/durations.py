"""Cost of each test of a run: wall time, and CPU time of its process and of the children it has waited for.

    tools/test                                   # writes build/durations.json and prints the first rows
    python -m tests.support.durations --rows 80  # that file as tables: modules, tests, and the end of each worker

The module is also the pytest plugin that measures; tests/support/two_phases.py registers it. A process that several
tests share counts for the test at whose end it is waited for, and a process that outlives its parent for no test.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FILE = Path("build/durations.json")
"""Relative to the working directory, which is the root of the repository."""
ROWS = 25


class Cost(NamedTuple):
    worker: str
    start_s: float
    """Since the epoch."""
    wall_s: float
    cpu_s: float


AT_START = pytest.StashKey[tuple[float, float]]()


def cpu_s() -> float:
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[AT_START] = time.time(), cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Add the cost of the test to its last report."""
    report = yield
    if report.when == "teardown":
        start_s, cpu_before_s = item.stash[AT_START]
        worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
        report.cost = (worker, start_s, time.time() - start_s, cpu_s() - cpu_before_s)
    return report


def write(costs: dict[str, Cost]) -> None:
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(costs, indent=0))


def table(costs: dict[str, Cost], rows: int = ROWS) -> Iterator[str]:
    """Yield the lines of the tables. ``costs``: of each test by its id; JSON has made lists of them."""
    costs = {name: Cost(*values) for name, values in costs.items()}
    yield from sums(((name.partition("::")[0], cost) for name, cost in costs.items()), "module", rows)
    yield from sums(costs.items(), "test", rows)
    workers: dict[str, list[Cost]] = defaultdict(list)
    for cost in costs.values():
        workers[cost.worker].append(cost)
    start_s = min((cost.start_s for cost in costs.values()), default=0.0)
    for worker, tests in sorted(workers.items()):
        end_s = max(cost.start_s + cost.wall_s for cost in tests) - start_s
        busy_s = sum(cost.wall_s for cost in tests)
        yield f"{worker}: {len(tests)} tests in {busy_s:.0f} s, the last one ended after {end_s:.0f} s"


def sums(costs: Iterable[tuple[str, Cost]], title: str, rows: int) -> Iterator[str]:
    """Yield a line for each of the names with the longest wall time, and one for all."""
    by_name: dict[str, list[Cost]] = defaultdict(list)
    for name, cost in costs:
        by_name[name].append(cost)
        by_name["all"].append(cost)
    lines = [
        (sum(cost.wall_s for cost in group), sum(cost.cpu_s for cost in group), len(group), name)
        for name, group in by_name.items()
    ]
    yield f"{'wall s':>8} {'CPU s':>8} {'tests':>6}  {title}"
    for wall_s, used_s, number, name in sorted(lines, reverse=True)[: rows + 1]:
        yield f"{wall_s:8.1f} {used_s:8.1f} {number:6d}  {name}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?", default=FILE)
    parser.add_argument("--rows", type=int, default=ROWS)
    chosen = parser.parse_args()
    print("\n".join(table(json.loads(chosen.file.read_text()), chosen.rows)))
