#!/usr/bin/env python3
"""Measure the cost of a checkpoint for the steps that run during the save: step time with a save over step time
without.

    tools/bench/async_save.py                       # 14 M parameters on one rank, five saves, on this machine
    tools/bench/async_save.py --hidden 1024 --layers 16 --ranks 8 --profile h100x64   # on a cluster

One run through the SFT role. A save affects two kinds of steps: the step that copies the state, which is blocked, and
the steps during the write, from the copy to the marker. Values are medians; the ratios are from one run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import ROOT, is_met

sys.path.insert(0, str(ROOT))

from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import SIDE_DONE


def train(folder: Path, options: argparse.Namespace) -> RunDir:
    tiny = folder / "tiny"
    shape = ["--hidden", str(options.hidden), "--layers", str(options.layers), "--rows", "2000"]
    subprocess.run([sys.executable, str(ROOT / "tools/tiny-model"), str(tiny), *shape], check=True)
    recipe = {
        "kind": "sft",
        "name": "async-save",
        "model": {"name": str(tiny / "model"), "renderer": {"name": "chatml"}},
        "layout": {"trainer": {"ranks": options.ranks}},
        "seq_len": options.seq_len,
        "max_steps": options.saves * options.interval,
        "sft": {"data": {"path": str(tiny / "sft.jsonl")}, "batch_size": options.rows},
        "optimizer": {"type": "adamw", "lr": 1e-4},
        "trainer": {"param_dtype": "float32"},
        "checkpoint": {"interval": options.interval, "keep_last": options.saves, "at_end": False},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    run = RunDir(folder / "run")
    command = [sys.executable, "-m", "primerl_hpc", "submit", str(path), "-p", options.profile]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "PRIMERL_HOME": str(folder / "state"),
    }
    subprocess.run(
        [*command, "--run-dir", str(run.root), "--follow"], check=True, env=environment, stdout=sys.stderr
    )
    return run


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4, help="packed rows per step")
    parser.add_argument("--interval", type=int, default=6, help="steps between saves")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--profile", default="local")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = train(Path(name), options)
        rows = read_steps(run.metrics("sft"))
        saves = []
        for step in run.complete_checkpoints():
            side = run.checkpoint_side(step, "trainer")
            # the metrics of a step are written after its copy
            saves.append((rows[step]["time"], (side / SIDE_DONE).stat().st_mtime))
        size = sum(path.stat().st_size for path in side.iterdir())
    beside, alone, copying, copies = [], [], [], []
    for step, row in rows.items():
        if "time/save_ckpt" in row:
            copying.append(row["time/step"])
            copies.append(row["time/save_ckpt"])
        elif step > 2:
            begin, end = row["time"] - row["time/step"], row["time"]
            is_beside = any(begin < saved and end > copied for copied, saved in saves)
            (beside if is_beside else alone).append(row["time/step"])
    writing = statistics.median(saved - copied for copied, saved in saves)
    print(f"{platform.machine()}, Python {platform.python_version()}, {size / 2**20:.0f} MiB per checkpoint")
    print(f"step without a save {statistics.median(alone):.3f} s ({len(alone)} steps)")
    print(
        f"step with the copy  {statistics.median(copying):.3f} s ({len(copying)} steps), "
        f"{statistics.median(copies):.3f} s of it blocked"
    )
    print(
        f"step during the write {statistics.median(beside):.3f} s ({len(beside)} steps), written in {writing:.2f} s"
    )
    met = [
        is_met(what, statistics.median(steps) / statistics.median(alone), at_most=1.15)
        for what, steps in (
            ("step with the copy over a step without a save", copying),
            ("step beside the writing over a step without a save", beside),
        )
    ]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
