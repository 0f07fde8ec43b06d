#!/usr/bin/env python3
"""Compare writing a policy version with a plain sequential write of the same size on the same filesystem: MB/s of both.

    tools/bench/weight_write.py                        # the shape of Qwen3-0.6B, random weights, written as bfloat16
    tools/bench/weight_write.py --folder /scratch/me   # on that filesystem

One rank exports its weights as the trainer does after every step: gathered layer by layer, converted to the engines'
dtype and names, written, fsynced, checksummed, marked stable. The plain write is one file in pieces of 8 MiB and an
fsync. They alternate; each ratio is of the two writes of one turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from machine import ROOT, describe_machine, is_met

sys.path.insert(0, str(ROOT))

PIECE_BYTES = 8 << 20
QWEN3_600M = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def plain_write(path: Path, num_bytes: int) -> float:
    """Return the seconds to write and fsync one new file."""
    piece = os.urandom(PIECE_BYTES)
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for start in range(0, num_bytes, PIECE_BYTES):
            file.write(piece[: num_bytes - start])
        os.fsync(file.fileno())
    duration_s = time.perf_counter() - started
    path.unlink()
    return duration_s


def build(folder: Path, shape: dict):
    """Create a one-rank trainer with random weights."""
    from primerl_hpc.recipe.load import parse_recipe
    from primerl_hpc.run.ports import free_port
    from primerl_hpc.run.rundir import RunDir
    from primerl_hpc.trainer.setup import start_world
    from primerl_hpc.trainer.train_step import build_trainer
    from primerl_hpc.trainer.watchdog import Watchdog

    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {**group, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(shape))
    recipe = parse_recipe(
        {
            "kind": "sft",
            "name": "x",
            "model": {"name": str(model)},
            "max_steps": 1,
            "sft": {"data": {"path": "x"}},
        }
    )
    run = RunDir(folder / "run")
    watchdog = Watchdog(run, "bench", rank=0, size=1, timeout_s=3600)
    return run, build_trainer(recipe, str(model), start_world(recipe), watchdog, may_be_random=True)


def take_turns(folder: Path, options: argparse.Namespace) -> tuple[int, list[float], list[float]]:
    """Return the bytes of a version, and the seconds of the plain writes and of the exports."""
    from primerl_hpc.run.step_dirs import STABLE
    from primerl_hpc.trainer.weights.filesystem import export_weights

    run, trainer = build(folder, QWEN3_600M | {"num_hidden_layers": options.layers})
    size, plain, ours = 0, [], []
    for turn in range(options.turns + 1):
        started = time.perf_counter()
        export_weights(run, trainer, turn)
        duration_s = time.perf_counter() - started
        version = run.weights_step(turn)
        size = sum(path.stat().st_size for path in version.iterdir())
        run.delete_step(version, STABLE)
        if turn:  # the first turn warms caches
            ours.append(duration_s)
            plain.append(plain_write(folder / "plain", size))
    return size, plain, ours


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="folder on the filesystem to measure [default: the temporary folder]"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        size, plain, ours = take_turns(Path(name), options)
    ratios = sorted(plain_s / ours_s for plain_s, ours_s in zip(plain, ours, strict=True))
    print(", ".join(f"{key} {value}" for key, value in describe_machine().items()))
    print(f"{size / 1e9:.2f} GB per version")
    for label, each in (("plain write", plain), ("export", ours)):
        middle = statistics.median(each)
        print(
            f"{label:>12}: {middle:.2f} s ({min(each):.2f} to {max(each):.2f}), {size / middle / 1e6:,.0f} MB/s"
        )
    print(
        f"export over plain: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}, {len(ratios)} turns)"
    )
    return (
        0
        if is_met("speed of an export over that of a plain write", statistics.median(ratios), at_least=0.8)
        else 1
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # skip the teardown of libraries, whose output would hide the figures
