"""tools/bench/mutations.py: it detects a known fault, and counts survivors without those that change nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import ROOT, captured

MODULE = "orchestrator/scoring/filters"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("cosmic_ray")
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "bench"))
    import mutations

    return mutations


def line_of(text: str) -> int:
    lines = (ROOT / "primerl_hpc" / f"{MODULE}.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.slow
def test_the_bench_detects_a_comparison_that_is_off_by_one(bench: Any) -> None:
    line = line_of(">= config.window")
    done = captured(
        [sys.executable, bench.__file__, "--module", MODULE, "--line", str(line), "--jobs", "1", "--json"]
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row == {"module": MODULE, "mutants": 4, "detected": 1.0, "survivors": [], "of": row["of"]}


def test_every_module_that_is_measured_exists_and_has_mutants_and_tests(bench: Any) -> None:
    for module, tests in bench.TESTS.items():
        assert len(bench.list_mutants(module)) > 10
        assert all((Path(ROOT) / "tests" / "unit" / name).is_file() for name in tests.split())


def test_a_survivor_counts_unless_its_change_has_no_effect(bench: Any) -> None:
    rows = [
        {"module": MODULE, "line": line, "change": change, "is_detected": is_detected}
        for line, change, is_detected in ((1, "a → b", True), (2, "c → d", False), (3, "e → f", False))
    ]
    bench.EQUIVALENT[MODULE, "e → f"] = "it changes nothing"
    try:
        row = bench.summarize(MODULE, rows)
    finally:
        del bench.EQUIVALENT[MODULE, "e → f"]
    assert (row["mutants"], row["detected"]) == (3, 0.5)
    assert [survivor["equivalent"] for survivor in row["survivors"]] == [None, "it changes nothing"]


def test_equivalent_changes_are_changes_of_lines_that_exist(bench: Any) -> None:
    for module, change in [*bench.EQUIVALENT, *bench.EQUIVALENT_LINES]:
        source = (ROOT / "primerl_hpc" / f"{module}.py").read_text()
        assert change.split(" → ")[0] in source, change
