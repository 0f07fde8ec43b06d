#!/usr/bin/env python3
"""Compare the trainer on one GPU with prime-rl's published figures: Qwen3-0.6B's shape, random weights, two rows per
step.

    tools/bench/trainer_speed.py                                   # on one H100 or H200
    tools/bench/trainer_speed.py --divide 128 --layers 2           # a quick check with short rows, also without a GPU
    tools/bench/trainer_speed.py --cases sft-8192                  # one case
    tools/bench/trainer_speed.py --set trainer.compile=true        # with another key of the recipe

Each case is `primerl-hpc bench trainer` or `bench sft`. Tokens/s are of training alone, like the published figures,
which were measured on an H100 and count padding; there is no padding here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from machine import QWEN3_600M, ROOT, show

ROWS = 2


@dataclass(frozen=True)
class Case:
    command: str
    seq_len: int
    goal: int  # tokens/s
    theirs: int  # tokens/s
    their_gib: float


CASES = {
    "rl-16384": Case("trainer", 16_384, 30_000, 16_400, 12.5),
    "rl-65536": Case("trainer", 65_536, 18_000, 10_800, 19.6),
    "sft-8192": Case("sft", 8_192, 45_000, 26_005, 31.7),
}


def profile_of(*, has_gpu: bool) -> dict:
    node = {"gpus": 1} if has_gpu else {"gpus": 0, "cpu_slots": 1}
    return {"name": "here", "nodes": 1, "scheduler": {"type": "local"}, "node": node}


def recipe_of(case: Case, folder: Path, seq_len: int) -> dict:
    return {
        "kind": "rl" if case.command == "trainer" else "sft",
        "name": "speed",
        "model": {"name": str(folder)},
        "seq_len": seq_len,
        "max_steps": 1,
        "layout": {"trainer": {"ranks": 1}},
        "environments": {"train": [{"id": "reverse-text"}]},
        "rollouts": {"batch_size": ROWS, "group_size": ROWS, "sampling": {"max_tokens": 8}},
        "sft": {"data": {"path": "made-up"}, "batch_size": ROWS},
    }


def run_case(case: Case, folder: Path, profile: Path, options: argparse.Namespace) -> dict:
    """Return the result of benchmark mode."""
    seq_len = case.seq_len // options.divide
    recipe = recipe_of(case, folder, seq_len)
    path = folder / f"{case.command}-{seq_len}.yaml"
    path.write_text(json.dumps(recipe))
    words = ["bench", case.command, str(path), "-p", str(profile), "--steps", str(options.steps), "--json"]
    changes = [word for change in options.changes for word in ("--set", change)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PRIMERL_RUNS_DIR": str(folder / "runs")}
    done = subprocess.run(
        [sys.executable, "-m", "primerl_hpc", *words, *changes],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
    )
    return json.loads(done.stdout)


def row_of(case: Case, result: dict) -> dict:
    speed, memory = result["rates"]["tokens_per_s_training"], result["peak_memory_gib"]
    return {
        "loop": result["loop"],
        "seq_len": result["seq_len"],
        "tokens/s": round(speed["median"]),
        "lowest": round(speed["min"]),
        "goal": case.goal,
        "theirs": case.theirs,
        "whole steps": round(result["rates"]["tokens_per_s"]["median"]),
        "MFU": result["rates"].get("mfu", {}).get("median", float("nan")),
        "GiB": memory.get("reserved", memory["resident"]),
        "their GiB": case.their_gib,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=QWEN3_600M["num_hidden_layers"])
    parser.add_argument("--divide", type=int, default=1, help="divide the row lengths by this number")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args()
    import torch

    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = QWEN3_600M | {"num_hidden_layers": options.layers, "max_position_embeddings": 65_536}
        (folder / "config.json").write_text(json.dumps(shape))
        profile = folder / "here.yaml"
        profile.write_text(json.dumps(profile_of(has_gpu=torch.cuda.is_available())))
        for case in (CASES[name] for name in options.cases):
            result = run_case(case, folder, profile, options)
            rows.append(row_of(case, result))
    device = result["device"]
    show(
        f"training of {options.layers} layers on one {device}, beside prime-rl's on one H100",
        rows,
        as_json=options.as_json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
