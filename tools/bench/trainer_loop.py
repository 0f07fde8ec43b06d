#!/usr/bin/env python3
"""Compare the trainer's loop with a bare torch loop: tokens/s of both with the same model, rows and machine.

    tools/bench/trainer_loop.py                                    # a small Qwen3, one rank and one thread on CPU
    tools/bench/trainer_loop.py --hidden 1024 --layers 28 --vocabulary 151936 --dtype bfloat16 --seq-len 8192   # a GPU

Two processes alternate step by step, so that other load on the machine affects both: the SFT loop as run by `bench`
(with requests and metrics), and `bare`, a minimal loop written by hand. Each ratio is of the two steps of one turn.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

from machine import ROOT, describe_machine, is_met

sys.path.insert(0, str(ROOT))


def bare(options: argparse.Namespace, turn: Connection) -> None:
    """Train with AdamW on the cross-entropy of packed rows with clipping; no sharding, metrics, watchdog or
    checkpoints.
    """
    import torch
    import torch.nn.functional as F
    from transformers import AutoConfig, AutoModelForCausalLM

    from primerl_hpc.trainer.batch import make_batch, stack_rows
    from primerl_hpc.trainer.sft.stream import make_row

    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = AutoConfig.from_pretrained(options.folder)
    has_flash = device.type == "cuda" and options.dtype == "bfloat16" and find_spec("flash_attn")
    attention = "flash_attention_2" if has_flash else "sdpa"  # the trainer's choice
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=options.dtype == "bfloat16")
    stream = made_up_stream(options, turn)
    while True:
        rows = [make_row(row) for row in stream.next_batch().rows]
        total = sum(int((row.ce_weights != 0).sum()) for row in rows)
        for group in stack_rows(rows, options.seq_len, device):
            batch = make_batch(group, device)
            with autocast:
                hidden = model.model(batch.input_ids, position_ids=batch.position_ids, use_cache=False)
                logits = model.lm_head(hidden.last_hidden_state.flatten(0, 1)[batch.predictors])
            loss = F.cross_entropy(logits.float(), batch.targets, reduction="sum") / total
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


def trainer(options: argparse.Namespace, turn: Connection) -> None:
    """Run the SFT loop on one rank."""
    from primerl_hpc.recipe.load import parse_recipe
    from primerl_hpc.run.ports import free_port
    from primerl_hpc.run.rundir import RunDir
    from primerl_hpc.trainer import sft_loop as sft
    from primerl_hpc.trainer.checkpoint.saver import Saver
    from primerl_hpc.trainer.control import StepFiles
    from primerl_hpc.trainer.setup import start_world
    from primerl_hpc.trainer.train_step import build_trainer
    from primerl_hpc.trainer.watchdog import Watchdog

    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {**group, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    recipe = parse_recipe(recipe_of(options))
    run = RunDir(Path(options.folder) / "run")
    world = start_world(recipe)
    watchdog = Watchdog(run, "bench", rank=0, size=1, timeout_s=3600)
    trainer = build_trainer(recipe, options.folder, world, watchdog, may_be_random=True)
    with Saver(run, trainer, sft.SIDES) as saver, StepFiles() as files:
        sft.train_steps(
            run, trainer, made_up_stream(options, turn), None, sft.Outputs(saver, files, data=[]), 0
        )


def recipe_of(options: argparse.Namespace) -> dict:
    return {
        "kind": "sft",
        "name": "bench",
        "model": {"name": options.folder},
        "max_steps": 1_000_000,
        "seq_len": options.seq_len,
        "sft": {"data": {"path": "made-up"}, "batch_size": options.rows},
        "trainer": {"param_dtype": options.dtype, "activation_checkpointing": "none"},
        "checkpoint": {"at_end": False},
    }


def made_up_stream(options: argparse.Namespace, turn: Connection):
    """Yield the same packed rows to both loops. Before each batch, report the end of the last step and wait for the
    next turn.
    """
    from primerl_hpc.plan.bench_plans import BenchRequest
    from primerl_hpc.recipe.load import parse_recipe
    from primerl_hpc.trainer.bench import SyntheticRows
    from primerl_hpc.trainer.sft.stream import SFTBatch, SFTStream

    class Turns(SFTStream):
        def next_batch(self) -> SFTBatch:
            turn.send("done")
            turn.recv()
            return super().next_batch()

    rows = SyntheticRows(BenchRequest(lengths=options.lengths), seed=0)
    return Turns(rows, parse_recipe(recipe_of(options)).sft, seq_len=options.seq_len, seed=0)


def write_config(options: argparse.Namespace) -> None:
    """Write a Qwen3 config of the requested shape, with tied embeddings like the small Qwen3 models."""
    heads = max(1, options.hidden // 64)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": options.vocabulary,
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": 128 if options.hidden >= 1024 else 64,
        "max_position_embeddings": options.seq_len,
        "tie_word_embeddings": True,
    }
    (Path(options.folder) / "config.json").write_text(json.dumps(config))


def take_turns(options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Return the seconds of each counted step: (bare, trainer)."""
    context = multiprocessing.get_context("spawn")
    ends, children = [], []
    for work in (bare, trainer):
        parent_end, child_end = context.Pipe()
        children.append(context.Process(target=work, args=(options, child_end), daemon=True))
        children[-1].start()
        child_end.close()  # so that `recv` raises EOFError if the child fails
        parent_end.recv()  # built, before its first step
        ends.append(parent_end)
    seconds: tuple[list[float], list[float]] = ([], [])
    for step in range(options.warm_up + options.steps):
        for which in (0, 1) if step % 2 else (1, 0):
            started = time.perf_counter()
            ends[which].send("go")
            ends[which].recv()
            if step >= options.warm_up:
                seconds[which].append(time.perf_counter() - started)
    for child in children:
        child.kill()
        child.join()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--rows", type=int, default=8, help="packed rows per step")
    parser.add_argument("--lengths", default="64-512", help="tokens of the samples, as for bench")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as options.folder:
        write_config(options)
        plain, ours = take_turns(options)
    tokens = options.rows * options.seq_len
    ratios = sorted(bare_s / ours_s for bare_s, ours_s in zip(plain, ours, strict=True))
    quarter = len(ratios) // 4
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()))
    print(
        f"{options.layers} layers of {options.hidden}, vocabulary {options.vocabulary}, {options.rows} "
        f"rows of {options.seq_len}"
    )
    for name, each in (("bare", plain), ("trainer", ours)):
        middle = statistics.median(each)
        print(
            f"{name:>8}: {middle:.3f} s a step ({min(each):.3f} to {max(each):.3f}), about "
            f"{tokens / middle:,.0f} tokens/s"
        )
    print(
        f"trainer over bare, tokens/s: {statistics.median(ratios):.3f} "
        f"(middle half {ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}, {len(ratios)} turns)"
    )
    return 0 if is_met("trainer over bare", statistics.median(ratios), at_least=0.97) else 1


if __name__ == "__main__":
    sys.exit(main())
