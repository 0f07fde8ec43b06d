"""The trainer's speed on one H100 or H200: assertions on the bench's goals."""

from __future__ import annotations

import json
import sys

import pytest

torch = pytest.importorskip("torch")

from tests.support.helpers import ROOT, captured  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch sees none"),
]


def test_every_case_reaches_its_goal_within_the_memory_of_the_reference():
    if not any(name in torch.cuda.get_device_name() for name in ("H100", "H200")):
        pytest.skip("the goals are for one H100 or H200")
    tool = [sys.executable, str(ROOT / "tools/bench/trainer_speed.py"), "--json"]
    rows = json.loads(captured(tool, check=True).stdout)["rows"]
    assert len(rows) == 3
    for row in rows:
        assert row["tokens/s"] >= row["goal"], row
        assert row["GiB"] <= row["their GiB"], row
