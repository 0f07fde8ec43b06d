"""`calibrate` on a node of the virtual cluster, and on this machine: a real measurement, saved as rows of CPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primerl_hpc.run.ledger.store import read_rows
from tests.support.virtual_slurm import run_cli

pytestmark = pytest.mark.usefixtures("cluster", "acting_user")
FIGURES = {"gemm": 18, "copy": 3, "all_gather": 3, "all_reduce": 3, "file_write": 1}


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["virtual", "local"])
def test_a_node_is_measured_and_its_rows_are_added_to_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    monkeypatch.setenv("PRIMERL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PRIMERL_RUNS_DIR", str(tmp_path / "runs"))
    done = run_cli("calibrate", "-p", profile, "--seconds", "1", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["gpu"] == result["device"] == "cpu"
    assert profile == "local" or result["node"] in {f"n{number}" for number in range(1, 5)}
    rows = read_rows(tmp_path / "home" / "ledger.jsonl", warn=pytest.fail)
    counts = {figure: sum(row.figure == f"hardware.{figure}" for row in rows) for figure in FIGURES}
    assert counts == FIGURES and all(row.measured > 0 and row.predicted is None for row in rows)
    assert "hardware.gemm" in done.stderr  # progress
    assert not list(tmp_path.glob("runs/.calibrate-*"))
