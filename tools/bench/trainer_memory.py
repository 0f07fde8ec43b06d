#!/usr/bin/env python3
"""Memory and time of a training step under each setting that trades one for the other.

    tools/bench/trainer_memory.py                    # a small Qwen3; on a GPU the shape of Qwen3-0.6B, random weights
    tools/bench/trainer_memory.py --model folder     # of the hub, or a folder: one without weights is given random ones

One rank and the trainer's own step, each setting in a process of its own. Peak: on CPU the highest sum of torch's live
allocations during the third step, beyond what was there before it; on a GPU the allocator's peak, all included. What
is offloaded stays in the same memory on a CPU: those lines mean something on a GPU alone. Ends with 1 where one fails, or
needs no less there than the one beside it in `SAVES`.
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
from machine import ROOT, is_met, peak_of
from weight_write import QWEN3_600M

sys.path.insert(0, str(ROOT))

from primerl_hpc.common.listen import free_port

SETTINGS: dict[str, dict] = {
    "nothing": {"activation_checkpointing": "none"},
    "nothing, in float32": {"activation_checkpointing": "none", "param_dtype": "float32"},
    "nothing, in bfloat16": {"activation_checkpointing": "none", "param_dtype": "bfloat16"},
    "recompute mlp": {"activation_checkpointing": ["mlp"]},
    "recompute mlp, attention": {"activation_checkpointing": ["mlp", "self_attn"]},
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
    "recompute blocks": "nothing",
    "recompute, inputs on host": "recompute blocks",
    "recompute, optimizer on host": "recompute blocks",
    "recompute, all on host": "recompute, optimizer on host",
}
"""What each must need less than, on a GPU."""


def run_setting(options: argparse.Namespace) -> dict[str, float]:
    import torch

    from primerl_hpc.common.rundir import RunDir
    from primerl_hpc.recipe.schema import Recipe
    from primerl_hpc.trainer.core import build_core
    from primerl_hpc.trainer.setup import end_world, start_world
    from primerl_hpc.trainer.watchdog import Watchdog

    on_gpu = torch.cuda.is_available()
    recipe = Recipe.model_validate(
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
    core = build_core(recipe, options.model, world, watchdog, may_be_random=True)
    row = make_row(options.tokens)
    for step in (1, 2):  # optimizer state and workspaces are there after the first
        core.train_step(step, [row], [])
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        duration_s = timed_step(core, row)
        peak = torch.cuda.max_memory_allocated()
    else:
        with torch.profiler.profile(profile_memory=True) as profile:
            core.train_step(3, [row], [])
        peak = peak_of(profile)
        duration_s = timed_step(core, row)
    end_world()
    return {"peak_mib": peak / 2**20, "seconds": duration_s}


def timed_step(core, row) -> float:
    started = time.perf_counter()
    core.train_step(3, [row], [])  # ends with a number on the host: nothing is under way after it
    return time.perf_counter() - started


def make_row(num_tokens: int):
    """One sample of ``num_tokens``, all but the first trained by cross-entropy."""
    from primerl_hpc.trainer import sft_data
    from primerl_hpc.trainer.sft_tokens import Sample

    ids = np.random.default_rng(0).integers(4, 100, num_tokens)
    return sft_data.make_row([Sample(ids, np.arange(num_tokens) > 0)])


def make_model(folder: Path) -> str:
    """A GPU may be where there is no hub: a shape alone. On a CPU a model that it can train in seconds."""
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
    parser.add_argument("--model", help="folder or hub id; default: one made here")
    parser.add_argument("--tokens", type=int, help="of the one row; default: 2,048, on a GPU 16,384")
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
        whole, peaks = None, {}
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
            whole = whole or row["peak_mib"]
            peaks[setting] = row["peak_mib"]
            print(
                f"{setting:>30} {row['peak_mib']:>9.0f} {row['peak_mib'] / whole:>10.2f} {row['seconds']:>7.2f}"
            )
    met = [
        is_met(f"peak of '{less}' over that of '{more}'", peaks[less] / peaks[more], at_most=0.99)
        for less, more in (SAVES.items() if torch.cuda.is_available() else ())
        if {less, more} <= set(peaks)
    ]
    return 0 if all(met) and len(peaks) == len(options.settings) else 1


if __name__ == "__main__":
    sys.exit(main())
