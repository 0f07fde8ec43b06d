"""Training continues while its filesystem does not respond, as far as it needs no new files.

tools/bench/stall.py measures two minutes of SFT.
"""

from __future__ import annotations

import argparse
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
from primerl_hpc.transport.rollouts.types import StepInfo
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
from stall import LIBRARY, measure

STALL_S = 15.0


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_training_continues_while_no_call_in_the_run_directory_returns() -> None:
    found = measure(argparse.Namespace(checkout=ROOT, stall=STALL_S, around=2.0, interval=10))
    assert found["steps_in_stall"] >= 3, found
    assert found["longest_step_in_stall_s"] < 0.8 * STALL_S, found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_rl_trains_on_the_batches_that_are_there_while_its_metrics_cannot_be_written(
    tmp_path: Path,
) -> None:
    run, flag, library = RunDir(tmp_path / "run"), tmp_path / "stalled", tmp_path / "stalled_files.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, LIBRARY, "-ldl"], check=True)
    model = make_tiny_model(tmp_path, rows=100, hidden=32, layers=1) / "model"
    recipe = rl_recipe(model, argparse.Namespace(steps=400, interval=None))
    make_plan(run.root, recipe, processes=[process_plan(Role.TRAINER)], model_path=model)
    rng, sender = np.random.default_rng(0), FilesystemSender(run)
    for step in range(1, 401):
        row = random_row(rng, [24, 30])
        sender.send(StepInfo(step=step, env_names=["reverse-text"]), [[row]])
    variables = {"STALL_FOLDER": str(run.root / "metrics"), "STALL_FLAG": str(flag)}
    trainer = start_role(run, "main", "trainer-0", LD_PRELOAD=str(library), **variables)
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
