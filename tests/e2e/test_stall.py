"""Training continues while its filesystem does not respond, as far as it needs no new files."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from primerl_hpc.common.names import Role
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.rollouts.filesystem import FilesystemSender
from primerl_hpc.transport.rollouts.micro_batch import StepInfo
from tests.support.helpers import (
    PATIENCE_S,
    ROOT,
    end_role,
    make_plan,
    make_tiny_model,
    process_plan,
    random_row,
    start_role,
    wait_for,
)

sys.path.insert(0, str(ROOT / "tools" / "bench"))

from files_of_run import rl_recipe

STEPS_IN_STALL = 20
"""Steps with two checkpoints."""
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def stalled_by(flag: Path, folder: Path) -> dict[str, str]:
    """Variables of a process whose calls with a path in ``folder`` wait while the file ``flag`` exists."""
    library = flag.with_suffix(".so")
    source = ROOT / "tests" / "support" / "stalled_files.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "STALL_FOLDER": str(folder), "STALL_FLAG": str(flag)}


def logged_step(log: str) -> int:
    """Return the last step in a trainer's log, whose lines arrive also in a stall: its file is open."""
    return int(re.findall(r"step (\d+)/", log)[-1])


def test_training_continues_while_no_call_in_the_run_directory_returns(tmp_path: Path) -> None:
    run, flag = RunDir(tmp_path / "run"), tmp_path / "stalled"
    model = make_tiny_model(tmp_path, rows=300, hidden=64) / "model"
    recipe = {
        "kind": "sft",
        "name": "stall",
        "model": {"name": str(model), "dtype": "float32", "renderer": {"name": "chatml"}},
        "seq_len": 128,
        "max_steps": 100_000,
        "sft": {"data": {"path": str(model.parent / "sft.jsonl")}, "batch_size": 8},
        "optimizer": {"lr": 1e-3},
        "trainer": {"param_dtype": "float32", "activation_checkpointing": "none"},
        "checkpoint": {"interval": 10, "keep_last": 2},
    }
    make_plan(run.root, recipe, processes=[process_plan(Role.SFT)], model_path=model)
    trainer = start_role(run, "main", "sft-0", **stalled_by(flag, run.root))
    try:
        log = (run.attempt_logs(1) / "sft-0.log").read_text
        wait_for(lambda: len(read_steps(run.metrics("sft"))) >= 10, "the first steps", tell=log)
        flag.touch()
        before = logged_step(log())
        wait_for(lambda: logged_step(log()) > before, "a line of the stall", tell=log)
        begin = logged_step(log())
        wait_for(lambda: logged_step(log()) >= begin + STEPS_IN_STALL, "steps in the stall", tell=log)
        assert len(read_steps(run.metrics("sft"))) <= begin, "the metrics were not stalled"
        flag.unlink()
        run.stop_request.write_text("{}")
        assert trainer.wait(PATIENCE_S) == 0, log()
    finally:
        flag.unlink(missing_ok=True)  # ranks that wait would not end
        end_role(trainer)
    steps = read_steps(run.metrics("sft"))
    assert run.latest_checkpoint() == max(steps)
    assert list(steps) == list(range(1, len(steps) + 1))


@pytest.mark.slow
def test_rl_trains_on_the_batches_that_are_there_while_its_metrics_cannot_be_written(tmp_path: Path) -> None:
    run, flag = RunDir(tmp_path / "run"), tmp_path / "stalled"
    model = make_tiny_model(tmp_path, rows=100, hidden=32, layers=1) / "model"
    recipe = rl_recipe(model, argparse.Namespace(steps=400, interval=None))
    make_plan(run.root, recipe, processes=[process_plan(Role.TRAINER)], model_path=model)
    rng, sender = np.random.default_rng(0), FilesystemSender(run)
    for step in range(1, 401):
        row = random_row(rng, [24, 30])
        sender.send(StepInfo(step=step, env_names=["reverse-text"]), [[row]])
    trainer = start_role(run, "main", "trainer-0", **stalled_by(flag, run.root / "metrics"))
    try:
        log = (run.attempt_logs(1) / "trainer-0.log").read_text
        wait_for(lambda: read_steps(run.metrics("trainer")), "the first step", tell=log)
        flag.touch()
        begin = max(run.stable_weights())
        wait_for(lambda: max(run.stable_weights()) >= begin + 3, "three steps in the stall", tell=log)
        rows = len(read_steps(run.metrics("trainer")))
        assert rows <= begin + 1, "the metrics were not stalled"
        run.stop_request.write_text("{}")
        flag.unlink()
        assert trainer.wait(PATIENCE_S) == 0
        steps = list(read_steps(run.metrics("trainer")))
        assert steps == list(range(1, len(steps) + 1)) and len(steps) >= begin + 3
    finally:
        flag.unlink(missing_ok=True)  # ranks that wait would not end
        for child in psutil.Process(trainer.pid).children(recursive=True) if trainer.poll() is None else ():
            child.kill()
        end_role(trainer)
