"""Memory saved by the memory settings on a GPU: assertions on the bench."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch")

from tests.support.helpers import ROOT, captured  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch sees none"),
]


def test_each_memory_setting_needs_less_than_the_one_before_it():
    tool = [sys.executable, str(ROOT / "tools/bench/trainer_memory.py"), "--tokens", "8192"]
    table = captured(tool, check=True).stdout
    assert table.count(": met") == 6
