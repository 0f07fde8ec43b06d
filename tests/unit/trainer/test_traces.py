"""The trainer's own step and its weight broadcast on a GPU that does not exist, at true scale."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.helpers import ROOT

pytest.importorskip("torch")

LAYERS = "2"
"""Full width, but few layers: what a layer allocates and sends is what the formulas and protocols are about."""


def traced(tool: str, *words: str, layers: str = LAYERS) -> list[dict[str, Any]]:
    command = [sys.executable, ROOT / "tools/bench" / tool, "--layers", layers, "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)["rows"]


def test_the_planner_predicts_the_peak_of_a_step_on_64_gpus():
    (row,) = traced("trainer_trace.py", "--cases", "mixture, two rows")
    assert row["ranks"] == 64 and abs(row["error"]) <= 0.05
    calls = row["collectives"]
    assert calls["alltoall_base"] == 2 * 11 * int(LAYERS)  # two rows; forward, recomputation and backward
    # nothing but the sizes of the experts' messages makes the host wait within the step
    assert row["waits"] == 2 * 2 * int(LAYERS) + row["waits_outside"]
    assert row["waits_outside"] <= 6


def test_the_planner_predicts_the_peak_of_a_step_on_1024_gpus():
    """Three dense layers of DeepSeek-V3 and two mixtures, whose shared experts are issued while tokens are sent."""
    (row,) = traced("trainer_trace.py", "--cases", "DeepSeek-V3", layers="5")
    assert row["ranks"] == 1024 and abs(row["error"]) <= 0.05
    assert row["collectives"]["alltoall_base"] == 2 * 11
    assert row["waits"] == 2 * 2 + row["waits_outside"]


def test_receivers_of_a_broadcast_issue_the_operations_of_the_sender():
    sender, files, *receivers = traced("broadcast_trace.py")
    assert [row["process"] for row in receivers] == ["engine rank 1", "engine rank 16"]
    for row in receivers:
        same = ("group", "operations", "sent_gib", "largest_mib", "tensors")
        assert {key: row[key] for key in same} == {key: sender[key] for key in same}
        assert row["peak_gib"] < 2.5  # two buckets of 0.5 GiB, and embedding and head as they arrive
    assert files["process"] == "files of rank 0" and files["peak_gib"] < 2.5  # the tensors of one gathering
    assert sender["group"] == 17 and sender["largest_mib"] < 513
