#!/usr/bin/env python3
"""Count the files of a run directory while a real trainer makes 1,000 RL steps; write docs/measurements/files.json.

    tools/bench/files_of_run.py --steps 1000

The trainer is the real one with one rank and a tiny model, with checkpoints every ``--interval`` steps and no kept
weights; this script sends it random batches in place of the orchestrator and marks the orchestrator's side of each
checkpoint. Files that the other roles write do not depend on the number of steps: they append to metrics and traces.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import ROOT, describe_machine

sys.path.insert(0, str(ROOT))

import numpy as np

from primerl_hpc.common.names import Role
from primerl_hpc.run.metrics import read_last_steps
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import SIDE_DONE
from primerl_hpc.transport.rollouts.filesystem import FilesystemSender
from primerl_hpc.transport.rollouts.micro_batch import StepInfo
from tests.support.helpers import make_plan, make_tiny_model, process_plan, random_row, role_env

OUT = ROOT / "docs" / "measurements" / "files.json"
BUDGET = 500
AHEAD = 2
"""Batches that wait for the trainer."""
SIDES = ("trainer", "orchestrator")


def rl_recipe(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "kind": "rl",
        "name": "files",
        "model": {"name": str(model), "dtype": "float32", "renderer": {"name": "chatml"}},
        "seq_len": 128,
        "max_steps": options.steps,
        "environments": {"train": [{"id": "reverse-text"}]},
        "rollouts": {"batch_size": 8, "group_size": 4, "sampling": {"max_tokens": 12}},
        "optimizer": {"lr": 1e-4},
        "trainer": {"param_dtype": "float32", "activation_checkpointing": "none"},
        "checkpoint": {"interval": options.interval, "keep_last": 2},
    }


def num_files(run: RunDir) -> int:
    return sum(len(names) for _, _, names in os.walk(run.root))


def follow_checkpoints(run: RunDir, marked: set[int]) -> None:
    for step in set(run.list_steps(run.checkpoints, f"trainer/{SIDE_DONE}")) - marked:
        run.checkpoint_side(step, "orchestrator").mkdir(exist_ok=True)
        run.finish_checkpoint_side(step, "orchestrator", SIDES)
        marked.add(step)


def train(options: argparse.Namespace, work: Path) -> list[dict[str, int]]:
    """Return the number of files after some of the steps."""
    model = make_tiny_model(work, rows=100, hidden=32, layers=1) / "model"
    run, rng, marked = RunDir(work / "run"), np.random.default_rng(0), set[int]()
    make_plan(run.root, rl_recipe(model, options), processes=[process_plan(Role.TRAINER)], model_path=model)
    rows: list[dict[str, int]] = []
    wanted = [step for step in (10, 100, 500, 1000, 2000) if step <= options.steps]
    with (work / "log").open("w") as log:
        trainer = subprocess.Popen(
            [sys.executable, "-m", "primerl_hpc.roles.trainer", str(run.root), "main", "trainer-0"],
            env=role_env(run, "main", "trainer-0"),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    sent = 0
    try:
        while trainer.poll() is None:
            done = max(read_last_steps(run.metrics("trainer"), 1), default=0)
            while sent < min(done + AHEAD, options.steps):
                sent += 1
                info = StepInfo(step=sent, env_names=("reverse-text",))
                FilesystemSender(run).send(info, [[random_row(rng, [24, 30, 28, 20])]])
            follow_checkpoints(run, marked)
            if wanted and done >= wanted[0]:
                rows.append({"step": wanted.pop(0), "files": num_files(run)})
            time.sleep(0.01)
        follow_checkpoints(run, marked)
        assert trainer.returncode == 0, (work / "log").read_text()[-3000:]
    finally:
        if trainer.poll() is None:
            os.killpg(trainer.pid, 9)
    return [*rows, {"step": options.steps, "files": num_files(run)}]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--interval", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = train(options, Path(folder))
    record = {"command": "tools/bench/files_of_run.py", **describe_machine(), "budget": BUDGET}
    record |= {"checkpoint_interval": options.interval, "rows": rows}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
