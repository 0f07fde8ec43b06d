"""`doctor --mismatch` measures a model with a real engine and the trainer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.helpers import ROOT, captured
from tests.support.served_updates import make_model

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_the_mismatch_of_engine_and_trainer_is_that_of_the_data_type(tmp_path: Path) -> None:
    make_model(
        tmp_path / "model", "cohere2", seed=1
    )  # whose window vLLM reads differently without our options
    command = [sys.executable, "-m", "primerl_hpc", "doctor", "--mismatch", str(tmp_path / "model")]
    done = captured([*command, "--dtype", "float32", "--json"], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (row,) = found["rows"]
    assert row["dtype"] == "float32" and row["is_ok"] and row["tokens"] == 32 * 48
    assert 0 < row["mismatch_kl"] < 1e-9 and row["mismatch_kl_max"] < 1e-7
    assert found["device"] == "cpu" and "float32: sampling 1536 tokens" in done.stderr
