"""The trainer's own step and its weight broadcast on a GPU that does not exist, at true scale."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_traces import ForkedTraces

pytest.importorskip("torch")

LAYERS = "2"
"""Full width, but few layers: what a layer allocates and sends is what the formulas and protocols are about."""


Trace = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def forked_traces() -> Iterator[ForkedTraces]:
    traces = ForkedTraces()
    yield traces
    traces.stop()


@pytest.fixture
def traced(forked_traces: ForkedTraces, tmp_path: Path) -> Trace:
    def rows(tool: str, *words: str, layers: str = LAYERS) -> list[dict[str, Any]]:
        code, out, err = forked_traces(tmp_path, tool, "--layers", layers, "--json", *words)
        assert code == 0, out + err
        return json.loads(out)["rows"]

    return rows


def test_the_planner_predicts_the_peak_of_a_step_on_64_gpus(traced: Trace):
    (row,) = traced("trainer_trace.py", "--cases", "mixture, two rows")
    assert row["ranks"] == 64 and abs(row["error"]) <= 0.05
    calls = row["collectives"]
    assert calls["alltoall_base"] == 2 * 11 * int(LAYERS)  # two rows; forward, recomputation and backward
    # nothing but the sizes of the experts' messages makes the host wait within the step
    assert row["waits"] == 2 * 2 * int(LAYERS) + row["waits_outside"]
    assert row["waits_outside"] <= 6


def test_the_planner_predicts_the_peak_of_a_step_on_1024_gpus(traced: Trace):
    """Three dense layers of DeepSeek-V3 and two mixtures, whose shared experts are issued while tokens are sent."""
    (row,) = traced("trainer_trace.py", "--cases", "DeepSeek-V3", layers="5")
    assert row["ranks"] == 1024 and abs(row["error"]) <= 0.05
    assert row["collectives"]["alltoall_base"] == 2 * 11
    assert row["waits"] == 2 * 2 + row["waits_outside"]


def test_receivers_of_a_broadcast_issue_the_operations_of_the_sender(traced: Trace):
    sender, files, *receivers = traced("broadcast_trace.py")
    assert [row["process"] for row in receivers] == ["engine rank 1", "engine rank 16"]
    for row in receivers:
        same = ("group", "operations", "sent_gib", "largest_mib", "tensors")
        assert {key: row[key] for key in same} == {key: sender[key] for key in same}
        assert row["peak_gib"] < 2.5  # two buckets of 0.5 GiB, and embedding and head as they arrive
    assert files["process"] == "files of rank 0" and files["peak_gib"] < 2.5  # the tensors of one gathering
    assert sender["group"] == 17 and sender["largest_mib"] < 513
