#!/usr/bin/env python3
"""Compare the loss of FP8 training with that of bfloat16: the same model, data and seed in each mode of trainer.fp8.

    tools/bench/fp8_training.py                                        # 200 steps of a dense and a mixture model
    tools/bench/fp8_training.py --json > docs/measurements/fp8_training.json

The trainer's own step, on the bytes of docs/*.md, with random initial weights. On CPUs the products are emulated: FP8
values and scales of GPUs, multiplied and summed in float32. `of_all` and `of_last` are the relative differences of the
mean loss of all and of the last 20 steps from those in bfloat16, `largest` the largest of 20 consecutive steps. A run
in float32 shows by how much two runs differ that only round differently. Exits with 1 if `of_all` or `of_last` of an
FP8 run exceeds 2 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from machine import ROOT, conclude

sys.path.insert(0, str(ROOT))

from primerl_hpc.run.ports import free_port

SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
MODELS = {
    "qwen3": SIZES,
    "qwen3_moe": SIZES | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}
MODES: dict[str, dict[str, str]] = {
    "bfloat16": {},
    "float32": {"param_dtype": "float32"},
    "blockwise": {"fp8": "blockwise"},
    "mxfp8": {"fp8": "mxfp8"},
}
"""Mode → keys of the block trainer. The first is what the others are compared with."""
ROWS, SEQ_LEN = 2, 256  # of a step
WINDOW = 20  # steps whose losses are averaged
MOST = 0.02


def make_model(name: str, folder: Path) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **MODELS[name]))
    model.save_pretrained(folder / name)
    return folder / name


def train(model: Path, keys: dict[str, str], steps: int, folder: Path) -> tuple[list[float], float]:
    """Return the loss of every step, and the seconds of a step."""
    from primerl_hpc.recipe.load import parse_recipe
    from primerl_hpc.run.rundir import RunDir
    from primerl_hpc.trainer.setup import end_world, start_world
    from primerl_hpc.trainer.sft.stream import make_row
    from primerl_hpc.trainer.sft.tokens import SFTSample
    from primerl_hpc.trainer.train_step import build_trainer
    from primerl_hpc.trainer.watchdog import Watchdog

    recipe = parse_recipe(
        {
            "kind": "sft",
            "name": "bench",
            "model": {"name": str(model)},
            "max_steps": steps,
            "seq_len": SEQ_LEN,
            "sft": {"data": {"path": "none"}},
            "optimizer": {"type": "adamw", "lr": 1e-3},
            "scheduler": {"type": "cosine", "warmup_steps": steps // 20},
            "trainer": {**keys, "activation_checkpointing": "none"},
        }
    )
    os.environ["MASTER_PORT"] = str(free_port("127.0.0.1"))
    world = start_world(recipe)
    watchdog = Watchdog(RunDir(folder), "bench", rank=0, size=1, timeout_s=3600)
    trainer = build_trainer(recipe, str(model), world, watchdog)
    text = np.frombuffer(
        "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md"))).encode(), np.uint8
    )
    is_trained, losses, started = np.arange(SEQ_LEN) > 0, [], time.perf_counter()
    for step in range(1, steps + 1):
        starts = np.random.default_rng(step).integers(0, len(text) - SEQ_LEN, ROWS)
        rows = [make_row([SFTSample(text[s : s + SEQ_LEN].astype(np.int32), is_trained)]) for s in starts]
        losses.append(trainer.train_step(step, rows, []).metrics["loss/mean"])
    seconds = (time.perf_counter() - started) / steps
    watchdog.pause()
    end_world()
    return losses, seconds


def windows(losses: list[float]) -> list[float]:
    return [statistics.mean(losses[start : start + WINDOW]) for start in range(0, len(losses), WINDOW)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1"}
    rows, wrong = [], []
    with tempfile.TemporaryDirectory() as name:
        for family in options.models:
            model, reference = make_model(family, Path(name)), []
            for mode, keys in MODES.items():
                losses, seconds = train(model, keys, options.steps, Path(name))
                reference = reference or losses
                changes = [
                    found / expected - 1
                    for found, expected in zip(windows(losses), windows(reference), strict=True)
                ]
                row = {
                    "model": family,
                    "mode": mode,
                    "steps": options.steps,
                    "last_loss": round(windows(losses)[-1], 4),
                    "of_all": round(abs(statistics.mean(losses) / statistics.mean(reference) - 1), 5),
                    "of_last": round(abs(changes[-1]), 5),
                    "largest": round(max(map(abs, changes)), 5),
                    "s_per_step": round(seconds, 3),
                }
                rows.append(row)
                print(f"{row} {[round(change, 4) for change in changes]}", file=sys.stderr, flush=True)
                if "fp8" in keys and max(row["of_all"], row["of_last"]) > MOST:
                    wrong.append(f"{family} with {mode} deviates: {row}")
    return conclude(
        f"Loss of FP8 training, {options.steps} steps, means of {WINDOW}", rows, wrong, as_json=options.json
    )


if __name__ == "__main__":
    sys.exit(main())
