"""Memory saved by the memory settings and the chunked head on a GPU: assertions on the benches."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from tests.support.helpers import ROOT  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch sees none"),
]


def bench(tool: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "tools/bench" / tool), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_each_memory_setting_needs_less_than_the_one_before_it():
    table = bench("trainer_memory.py", "--tokens", "8192")
    assert table.count(": met") == 6


def test_chunked_head_needs_an_eighth_of_the_plain_ones_memory():
    table = bench("chunked_head.py", "--device", "cuda")
    assert float(re.search(r"ratio: +([\d.]+)", table)[1]) >= 8
    differences = [float(each) for each in re.findall(r"largest difference (\S+)", table)]
    assert len(differences) == 4
    assert max(differences[:2]) < 1e-5
