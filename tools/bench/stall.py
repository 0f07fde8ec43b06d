#!/usr/bin/env python3
"""Measure what a filesystem that does not respond for a while costs SFT; write docs/measurements/stall.json.

    tools/bench/stall.py --stall 120
    tools/bench/stall.py --checkout ../before --label before

A real trainer of one rank trains a tiny model and saves checkpoints every ``--interval`` steps. A library in LD_PRELOAD
(stalled_files.c, compiled with cc) blocks all its calls with a path in the run directory for ``--stall`` seconds. The
cost is the time by which long steps (of `LONG_S`) in the stall exceed the median step, less what such steps cost in the
time around it, per second: other work on the machine makes steps long at any time. RL is not measured: its batches and
weights pass through the run directory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from machine import ROOT, describe_machine

sys.path.insert(0, str(ROOT))

from primerl_hpc.common.names import Role
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import make_plan, make_tiny_model, process_plan, role_env, wait_for

OUT = ROOT / "docs" / "measurements" / "stall.json"
LIBRARY = Path(__file__).with_name("stalled_files.c")
LONG_S = 0.3
"""About the shortest time that a step waits for the filesystem."""


def sft_recipe(model: Path, interval: int) -> dict[str, Any]:
    return {
        "kind": "sft",
        "name": "stall",
        "model": {"name": str(model), "dtype": "float32", "renderer": {"name": "chatml"}},
        "seq_len": 128,
        "max_steps": 100_000,
        "sft": {"data": {"path": str(model.parent / "sft.jsonl")}, "batch_size": 8},
        "optimizer": {"lr": 1e-3},
        "trainer": {"param_dtype": "float32", "activation_checkpointing": "none"},
        "checkpoint": {"interval": interval, "keep_last": 2},
    }


def train_through_stall(options: argparse.Namespace, work: Path) -> tuple[list[float], float, float]:
    """Return the times at which steps ended, and when the stall began and ended."""
    library, flag = work / "stalled_files.so", work / "stalled"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, LIBRARY, "-ldl"], check=True)
    model = make_tiny_model(work, rows=300, hidden=64) / "model"
    run = RunDir(work / "run")
    make_plan(
        run.root, sft_recipe(model, options.interval), processes=[process_plan(Role.SFT)], model_path=model
    )
    variables = {
        "PYTHONPATH": str(options.checkout.resolve()),
        "LD_PRELOAD": str(library),
        "STALL_FOLDER": str(run.root),
        "STALL_FLAG": str(flag),
    }
    with (work / "log").open("w") as log:
        trainer = subprocess.Popen(
            [sys.executable, "-m", "primerl_hpc.roles.sft", str(run.root), "main", "sft-0"],
            env=role_env(run, "main", "sft-0", **variables),
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=work,
        )
    try:
        wait_for(
            lambda: trainer.poll() is None and len(read_steps(run.metrics("sft"))) >= options.interval,
            "the first steps",
            (work / "log").read_text,
        )
        time.sleep(options.around)
        flag.touch()
        begin = time.time()
        time.sleep(options.stall)
        flag.unlink()
        end = time.time()
        time.sleep(options.around)
        assert trainer.poll() is None, (work / "log").read_text()
        run.stop_request.write_text("{}")
        assert trainer.wait(120) == 0, (work / "log").read_text()
    finally:
        if trainer.poll() is None:
            os.killpg(trainer.pid, 9)
    assert run.latest_checkpoint() == max(read_steps(run.metrics("sft")))
    return [row["time"] for row in read_steps(run.metrics("sft")).values()], begin, end


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        times, begin, end = train_through_stall(options, Path(folder))
    gaps = [(after - before, before) for before, after in pairwise(times)]
    normal = [gap for gap, since in gaps if begin - options.around < since < begin - 1 or since > end + 1]
    median_s = statistics.median(normal)
    during = [time for time in times if begin <= time <= end]
    in_stall = [gap for gap, since in gaps if since <= end and since + gap >= begin]
    excess_s, around_s = long_steps(in_stall, median_s), long_steps(normal, median_s)
    noise_s = around_s * (end - begin) / sum(normal)
    return {
        "stall_s": round(end - begin, 1),
        "steps_in_stall": len(during),
        "steps_expected": round((end - begin) / statistics.fmean(normal)),
        "median_step_s": round(median_s, 4),
        "longest_step_around_s": round(max(normal), 2),
        "longest_step_in_stall_s": round(max(in_stall), 2),
        "long_steps_in_stall_s": round(excess_s, 2),
        "long_steps_otherwise_s": round(noise_s, 2),
        "cost_s": round(excess_s - noise_s, 2),
    }


def long_steps(gaps: list[float], median_s: float) -> float:
    """Return by how much long steps exceed the median in total, in seconds."""
    return sum(gap - median_s for gap in gaps if gap >= LONG_S)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--label", default="now")
    parser.add_argument("--stall", type=float, default=120.0, help="seconds")
    parser.add_argument("--around", type=float, default=60.0, help="seconds before and after the stall")
    parser.add_argument("--interval", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    record = json.loads(options.out.read_text()) if options.out.exists() else {}
    record |= {
        "command": "tools/bench/stall.py",
        **describe_machine(),
        "checkpoint_interval": options.interval,
    }
    record[options.label] = measure(options)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
