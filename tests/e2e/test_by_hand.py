"""One part at a time: every role of an RL run started by its own command, as the README shows, without a supervisor.

The run is one that no other test has: a mixture of experts, and conversations of two turns.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from primerl_hpc.common.metrics import read_steps
from primerl_hpc.common.rundir import STABLE, RunDir
from tests.support import ROOT, make_tiny_model

pytestmark = [pytest.mark.e2e]


def primerl(*words: str, cwd: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    log = (cwd / f"{words[0]}.log").open("ab")
    return subprocess.Popen(
        [sys.executable, "-m", "primerl_hpc", *words], cwd=cwd, env=environment, stdout=log, stderr=log
    )


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()


def prepare(folder: Path, *overrides: str) -> RunDir:
    """``submit --dry-run --run-dir``: a run directory with nothing started."""
    tiny = make_tiny_model(folder / "tiny", task="alphabet-sort", experts=4, rows=500)
    settings = [
        f"model.name={tiny}/model",
        f"warmup.sft.data.path={tiny}/sft.jsonl",
        "warmup.max_steps=5",
        "environments.eval=[]",
        "rollouts.batch_size=32",
        *overrides,
    ]
    words = [word for text in settings for word in ("--set", text)]
    done = primerl(
        "submit", "alphabet_sort/tiny", "-p", "local", "--dry-run", "--run-dir", "run", *words, cwd=folder
    )
    assert done.wait(timeout=60) == 0, (folder / "submit.log").read_text()
    return RunDir(folder / "run")


def test_every_role_of_a_run_can_be_started_by_its_own_command(tmp_path: Path) -> None:
    run = prepare(tmp_path, "max_steps=3")
    sft = primerl("sft", "run", cwd=tmp_path)
    try:
        assert sft.wait(timeout=240) == 0, (tmp_path / "sft.log").read_text()[-3000:]
    finally:
        end([sft])
    assert (run.phase("warmup").weights_step(5) / STABLE).exists()

    roles = [
        primerl(name, "run", cwd=tmp_path)
        for name in ("inference", "router", "env-server", "orchestrator", "trainer")
    ]
    try:
        for process, name in ((roles[3], "orchestrator"), (roles[4], "trainer")):
            assert process.wait(timeout=480) == 0, (tmp_path / f"{name}.log").read_text()[-3000:]
        assert all(process.poll() is None for process in roles[:3])
    finally:
        end(roles)
    steps = read_steps(run.metrics("trainer"))
    assert list(steps) == [1, 2, 3] and run.stable_weights()[-1] == run.latest_checkpoint() == 3
    # experts that an engine did not take over would sample tokens of other probability
    assert all(row["mismatch_kl/all/mean"] <= 0.03 for row in steps.values())
    turns = [row["turns/max"] for row in read_steps(run.metrics("orchestrator")).values()]
    assert turns == [2, 2, 2]
