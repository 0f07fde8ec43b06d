"""tools/one_step.py, the algorithm on one page, is a real step: docs/architecture.md begins with it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import ROOT

SCRIPT = ROOT / "tools" / "one_step.py"


def tensors_of(folder: Path) -> dict[str, list[float]]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name).flatten().tolist() for name in file.keys()}  # noqa: SIM118
    return tensors


def test_a_step_trains_the_policy_that_sampled_and_publishes_another(work: Path, tmp_path: Path) -> None:
    model, folder = work / "outputs" / "tiny" / "model", tmp_path / "run"
    done = subprocess.run(
        [sys.executable, SCRIPT, model, folder], capture_output=True, text=True, check=True, timeout=300
    )
    numbers = re.search(
        r"(\d+) samples in (\d+) rows, [^{]*{.*kl/all/mean': ([\d.e-]+), .*norm': ([\d.e-]+)", done.stdout
    )
    assert numbers is not None, done.stdout
    samples, rows, kl, norm = map(float, numbers.groups())
    assert 100 < samples <= 128 and rows < samples, "128 rollouts, without those of groups with equal rewards"
    assert kl == pytest.approx(0, abs=1e-6), "trainer and engine compute the same probabilities"
    assert norm > 0
    before, after = tensors_of(model), tensors_of(RunDir(folder).weights_step(1))
    assert before.keys() == after.keys() and before != after


def test_the_page_is_short() -> None:
    lines = SCRIPT.read_text().split('"""', 2)[2].splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 80
