#!/usr/bin/env python3
"""Run complete RL on reverse-text with real vLLM engines and weight updates; print speeds and the planner's figures.

    tools/bench/rl_run.py                                   # Qwen3-0.6B's shape, on the GPUs of this machine
    tools/bench/rl_run.py --transports delta broadcast      # two of the ways in which weights reach the engine
    tools/bench/rl_run.py --small                           # the same with a tiny model, also on CPUs: two minutes
    tools/bench/rl_run.py --engine transformers             # engines of `plain_engine.py`; the default without vLLM

Weights are random, so rewards mean nothing: `rewards.py` shows learning. On one GPU (or with
--slots 1) engine and trainer take turns; with `delta` they share its memory, and `broadcast`, which needs two GPUs, is
left out. Each run is `primerl-hpc submit`; the steps after the first are measured. Speeds of engines in transformers
mean nothing. Exits with 1 if a run does not end as done, or an update is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from machine import QWEN3_600M, ROOT, conclude

sys.path.insert(0, str(ROOT))

from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import RunState
from primerl_hpc.observe.status.predicted import compare_with_plan, sentence
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir

TRANSPORTS = ("filesystem", "delta", "broadcast")
GPUS = (("H200", "H200-SXM"), ("H100", "H100-SXM"), ("A100", "A100-SXM-80GB"))
"""Part of the device's name → the planner's name."""


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of a batch."""

    shape: dict[str, Any]
    dtype: str
    seq_len: int
    batch_size: int
    group_size: int
    max_tokens: int


LARGE = Size(QWEN3_600M, "bfloat16", 2048, 128, 16, 128)
TINY_SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
SMALL = Size(QWEN3_600M | TINY_SHAPE | {"vocab_size": 512}, "float32", 128, 16, 4, 12)


def device_of() -> tuple[int, str | None]:
    """Return the number of GPUs and the planner's name of them; 0 and None on a machine without."""
    import torch

    if not torch.cuda.is_available():
        return 0, None
    name = torch.cuda.get_device_name(0)
    return torch.cuda.device_count(), next((known for part, known in GPUS if part in name), None)


def make_model(folder: Path, size: Size, device: str) -> Path:
    """Write a model with random weights, and a tokenizer of single characters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    command = [sys.executable, str(ROOT / "tools" / "tiny-model"), str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    model = folder / "model"
    shape = {key: value for key, value in size.shape.items() if key not in ("architectures", "model_type")}
    tiny = AutoConfig.from_pretrained(model)
    ids = {key: getattr(tiny, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model("qwen3", **shape, **ids)
    torch.manual_seed(0)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, size.dtype))
    made.save_pretrained(model)
    return model


def profile_of(num_gpus: int, gpu: str | None, slots: int) -> dict[str, Any]:
    node: dict[str, Any] = {"gpus": num_gpus} if num_gpus else {"gpus": 0, "cpu_slots": slots}
    if gpu is not None:
        node["gpu"] = gpu
    profile = {"name": "here", "nodes": 1, "scheduler": {"type": "local"}, "node": node}
    return profile if num_gpus else {**profile, "env": {"OMP_NUM_THREADS": "1"}}


def recipe_of(model: Path, size: Size, transport: str, steps: int, *, is_colocated: bool) -> dict[str, Any]:
    layout: dict[str, Any] = {"inference": {"replicas": 1}, "trainer": {"ranks": 1}}
    takes_turns = (
        is_colocated and transport == "filesystem"
    )  # the only transport with which engines may sleep
    if is_colocated:
        layout["colocated"] = {"mode": "sleep" if takes_turns else "share"}
    return {
        "kind": "rl",
        "name": "rl-run",
        "model": {"name": str(model), "dtype": size.dtype, "renderer": {"name": "chatml"}},
        "seq_len": size.seq_len,
        "max_steps": steps,
        "layout": layout,
        "environments": {"train": [{"id": "reverse-text"}]},
        "rollouts": {
            "batch_size": size.batch_size,
            "group_size": size.group_size,
            "zero_advantage": "keep",
            "max_off_policy_steps": 0 if takes_turns else 1,
            "sampling": {"max_tokens": size.max_tokens},
        },
        "inference": {} if size.dtype == "bfloat16" else {"kv_cache_gib": 0.125},
        "trainer": {"param_dtype": size.dtype},
        "weights": {"transport": transport},
    }


def plain_python(folder: Path) -> Path:
    """Write an interpreter that starts `plain_engine.py` as the role of engines, and is not asked for vLLM."""
    path, bench = folder / "python", Path(__file__).resolve().parent / "plain_engine.py"
    path.write_text(
        f'#!/bin/sh\n[ "$2" = primerl_hpc.roles.inference ] && exec {sys.executable} {bench} "$@"\n'
        'for word; do shift; [ "$word" = vllm ] || set -- "$@" "$word"; done\n'
        f'exec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    return path


def run(folder: Path, recipe: dict[str, Any], profile: dict[str, Any]) -> RunDir:
    """Run the recipe as a user would, and return its directory."""
    root = folder / "runs" / recipe["weights"]["transport"]
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    (folder / "profile.yaml").write_text(json.dumps(profile))
    words = ["submit", "recipe.yaml", "-p", "profile.yaml", "--run-dir", str(root), "--follow"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PRIMERL_HOME": str(folder / "state")}
    subprocess.run(
        [sys.executable, "-m", "primerl_hpc", *words],
        cwd=folder, env=environment, stdout=sys.stderr, check=False,
    )  # fmt: skip
    return RunDir(root)


def row_of(done: RunDir) -> dict[str, Any]:
    trainer = list(read_steps(done.metrics("trainer")).values())
    orchestrator = list(read_steps(done.metrics("orchestrator")).values())

    def median(rows: list[dict[str, Any]], key: str) -> float:
        found = [row[key] for row in rows[1:] or rows if key in row]
        return round(statistics.median(found), 4) if found else float("nan")

    return {
        "transport": done.root.name,
        "state": str(take_snapshot(done).state),
        "steps": len(trainer),
        "updates": sum("time/weight_update" in row for row in orchestrator),
        "step_s": median(orchestrator, "time/step"),
        "train_s": median(trainer, "time/step"),
        "tokens/s": median(trainer, "perf/throughput"),
        "publish_s": median(trainer, "time/broadcast_weights"),
        "update_s": median(orchestrator, "time/weight_update"),
        "paused_s": median(orchestrator, "time/engines_paused"),
        "GiB": median(trainer, "perf/peak_memory"),
        "mismatch_kl": median(trainer, "mismatch_kl/all/mean"),
    }


def failures(row: dict[str, Any], steps: int) -> list[str]:
    """Return what is wrong with a run."""
    name = row["transport"]
    found = [] if row["state"] == str(RunState.DONE) else [f"{name}: the run is {row['state']}"]
    if row["steps"] < steps:
        found.append(f"{name}: {row['steps']} of {steps} steps")
    if not row["updates"]:
        found.append(f"{name}: no batch came after a weight update")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--small", action="store_true", help="a tiny model and short batches")
    engine = "transformers" if find_spec("vllm") is None else "vllm"
    parser.add_argument("--engine", choices=("vllm", "transformers"), default=engine)
    parser.add_argument("--slots", type=int, default=2, help="CPU slots without a GPU [default: 2]")
    parser.add_argument("--folder", type=Path, help="keep everything here [default: a temporary folder]")
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args()
    num_gpus, gpu = device_of()
    places = num_gpus or options.slots
    transports = [name for name in options.transports if places > 1 or name != "broadcast"]
    size = SMALL if options.small or not num_gpus else LARGE
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        model = make_model(folder / "outputs", size, "cuda" if num_gpus else "cpu")
        profile = profile_of(min(num_gpus, 2), gpu, options.slots)
        if options.engine == "transformers":
            profile["software"] = {"roles": {"inference": {"python": str(plain_python(folder))}}}
        for transport in transports:
            recipe = recipe_of(model, size, transport, options.steps, is_colocated=places == 1)
            done = run(folder, recipe, profile)
            row = row_of(done)
            plan = read_json(done.plan) if done.plan.exists() else {}
            compared = compare_with_plan(done, plan)
            for found in compared:
                print(f"{transport}: {sentence(found)}", file=sys.stderr)
            if options.as_json:
                row["planner"] = [found.as_json() for found in compared]
            rows.append(row)
    wrong = [text for row in rows for text in failures(row, options.steps)]
    what = f"Complete RL runs with engines of {options.engine}, medians of the steps after the first"
    return conclude(what, rows, wrong, as_json=options.as_json)


if __name__ == "__main__":
    sys.exit(main())
