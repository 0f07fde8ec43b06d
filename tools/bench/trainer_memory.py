#!/usr/bin/env python3
"""Measure memory and time of a training step under each setting that trades one for the other.

    tools/bench/trainer_memory.py                    # a small Qwen3; on a GPU the shape of Qwen3-0.6B, random weights
    tools/bench/trainer_memory.py --model folder     # a hub id or a folder; random weights if it has none

One rank and the trainer's own step, each setting in its own process. Peak: on CPU the highest sum of torch's live
allocations during the third step above those at its start; on a GPU the allocator's peak in total. On a CPU, offloaded
data stays in the same memory, so these lines are meaningful on a GPU only. Exits with 1 if a setting fails, or needs no
less memory on a GPU than the setting paired with it in `SAVES`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from machine import QWEN3_600M, ROOT, is_met, peak_of

sys.path.insert(0, str(ROOT))

from primerl_hpc.run.ports import free_port

SETTINGS: dict[str, dict] = {
    "nothing": {"activation_checkpointing": "none"},
    "nothing, in float32": {"activation_checkpointing": "none", "param_dtype": "float32"},
    "nothing, in bfloat16": {"activation_checkpointing": "none", "param_dtype": "bfloat16"},
    "recompute mlp": {"activation_checkpointing": ["mlp"]},
    "recompute mlp, attention": {"activation_checkpointing": ["mlp", "self_attn"]},
    "recompute every second block": {"activation_checkpointing": "full", "activation_checkpointing_every": 2},
    "recompute blocks": {"activation_checkpointing": "full"},
    "recompute, inputs on host": {"activation_checkpointing": "full", "activation_offload": True},
    "recompute, optimizer on host": {"activation_checkpointing": "full", "optimizer_offload": True},
    "recompute, all on host": {
        "activation_checkpointing": "full",
        "activation_offload": True,
        "cpu_offload": True,
    },
    "recompute, compile": {"activation_checkpointing": "full", "compile": True},
}
SAVES = {
    "nothing": "nothing, in float32",
    "recompute every second block": "nothing",
    "recompute blocks": "recompute every second block",
    "recompute, inputs on host": "recompute blocks",
    "recompute, optimizer on host": "recompute blocks",
    "recompute, all on host": "recompute, optimizer on host",
}
"""setting → the setting that must need more memory on a GPU."""


def run_setting(options: argparse.Namespace) -> dict[str, float]:
    import torch

    from primerl_hpc.recipe.load import parse_recipe
    from primerl_hpc.run.rundir import RunDir
    from primerl_hpc.trainer.setup import end_world, start_world
    from primerl_hpc.trainer.train_step import build_trainer
    from primerl_hpc.trainer.watchdog import Watchdog

    on_gpu = torch.cuda.is_available()
    recipe = parse_recipe(
        {
            "kind": "sft",
            "name": "bench",
            "model": {"name": options.model},
            "max_steps": 3,
            "seq_len": options.tokens,
            "sft": {"data": {"path": "none"}},
            "trainer": {"param_dtype": "bfloat16" if on_gpu else "float32", **SETTINGS[options.setting]},
        }
    )
    world = start_world(recipe)
    watchdog = Watchdog(RunDir(options.folder), "bench", rank=0, size=1, timeout_s=3600)
    trainer = build_trainer(recipe, options.model, world, watchdog, may_be_random=True)
    row = make_row(options.tokens)
    for step in (1, 2):  # optimizer state and workspaces are allocated in the first step
        trainer.train_step(step, [row], [])
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        duration_s = timed_step(trainer, row)
        peak = torch.cuda.max_memory_allocated()
    else:
        with torch.profiler.profile(profile_memory=True) as profile:
            trainer.train_step(3, [row], [])
        peak = peak_of(profile)
        duration_s = timed_step(trainer, row)
    end_world()
    return {"peak_mib": peak / 2**20, "seconds": duration_s}


def timed_step(trainer, row) -> float:
    started = time.perf_counter()
    trainer.train_step(3, [row], [])  # returns a host value, so all kernels have finished
    return time.perf_counter() - started


def make_row(num_tokens: int):
    """Return one sample of ``num_tokens``, trained by cross-entropy on all but the first."""
    from primerl_hpc.trainer.sft import stream as sft_data
    from primerl_hpc.trainer.sft.tokens import SFTSample

    ids = np.random.default_rng(0).integers(4, 100, num_tokens)
    return sft_data.make_row([SFTSample(ids, np.arange(num_tokens) > 0)])


def make_model(folder: Path) -> str:
    """Create a model without access to the hub: Qwen3-0.6B's shape for a GPU, a small model for a CPU."""
    import torch

    model = folder / "model"
    if torch.cuda.is_available():
        model.mkdir()
        (model / "config.json").write_text(json.dumps(QWEN3_600M | {"max_position_embeddings": 65_536}))
    else:
        tool = [sys.executable, ROOT / "tools/tiny-model", folder, "--hidden", "256", "--layers", "8"]
        subprocess.run(tool, check=True, capture_output=True)
    return str(model)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id [default: a generated model]")
    parser.add_argument("--tokens", type=int, help="tokens of the row [default: 2,048, on a GPU 16,384]")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--setting", choices=list(SETTINGS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.setting:
        print(json.dumps(run_setting(options)))
        return 0
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    tokens = options.tokens or (16_384 if torch.cuda.is_available() else 2048)
    print(f"{device}, {tokens} tokens")
    print(f"{'setting':>30} {'peak MiB':>9} {'of nothing':>10} {'s/step':>7}")
    with tempfile.TemporaryDirectory() as name:
        model = options.model or make_model(Path(name))
        baseline, peaks = None, {}
        for setting in options.settings:
            command = [sys.executable, __file__, "--model", model, "--tokens", str(tokens)]
            group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
            done = subprocess.run(
                [*command, "--setting", setting, "--folder", name],
                env={**os.environ, **group, **meeting},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                print(f"{setting:>30} failed: {(done.stderr.splitlines() or ['?'])[-1]}")
                continue
            row = json.loads(done.stdout.splitlines()[-1])
            baseline = baseline or row["peak_mib"]
            peaks[setting] = row["peak_mib"]
            print(
                f"{setting:>30} {row['peak_mib']:>9.0f} {row['peak_mib'] / baseline:>10.2f} {row['seconds']:>7.2f}"
            )
    met = [
        is_met(f"peak of '{less}' over that of '{more}'", peaks[less] / peaks[more], at_most=0.99)
        for less, more in (SAVES.items() if torch.cuda.is_available() else ())
        if {less, more} <= set(peaks)
    ]
    return 0 if all(met) and len(peaks) == len(options.settings) else 1


if __name__ == "__main__":
    sys.exit(main())
