#!/usr/bin/env python3
"""Trace the trainer's own step at true scale without a GPU, and compare its memory and collectives with the planner.

    tools/bench/trainer_trace.py                                    # all cases
    tools/bench/trainer_trace.py --cases dense mixture              # of these names
    tools/bench/trainer_trace.py --cases dense --top 20             # and what is alive at the peak
    tools/bench/trainer_trace.py --json > docs/measurements/trainer_trace.json

Each case is one rank of a fake process group on a fake GPU (step_tracer.py), in a forked process: real code, no memory.
Exits with 1 if a predicted peak differs from the traced one by more than `LARGEST_ERROR`, or a case fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fake_gpu
from machine import ROOT, conclude

sys.path.insert(0, str(ROOT))

GIB = 2**30
LARGEST_ERROR = 0.05


@dataclass(frozen=True)
class TraceCase:
    """A model, a layout and the options of the trainer."""

    model: str
    ranks: int
    seq_len: int
    rows: int = 1
    """Rows of a rank and step."""
    layers: int | None = None
    """None: those of the model."""
    layout: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)


FULL = {"activation_checkpointing": "full"}
SMALL, MEDIUM, LARGE = "Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "Qwen/Qwen3-32B"
MIXTURE, BIG, DEEPSEEK = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B", "deepseek-ai/DeepSeek-V3"
LORA = {"lora": {"rank": 32, "alpha": 64}}
CASES: dict[str, TraceCase] = {
    "one GPU": TraceCase(SMALL, 1, 16_384, trainer=FULL),
    "dense": TraceCase(MEDIUM, 8, 16_384, trainer=FULL),
    "dense, two rows": TraceCase(MEDIUM, 8, 16_384, rows=2, trainer=FULL),
    "dense, nothing recomputed": TraceCase(MEDIUM, 8, 8192, trainer={"activation_checkpointing": "none"}),
    "dense, selective": TraceCase(
        MEDIUM, 8, 8192, trainer={"activation_checkpointing": ["mlp", "self_attn"]}
    ),
    "dense, HSDP": TraceCase(LARGE, 64, 16_384, rows=2, layout={"replicate": 4}, trainer=FULL),
    "dense, context": TraceCase(LARGE, 32, 65_536, layout={"context_parallel": 4}, trainer=FULL),
    "dense, offload": TraceCase(
        LARGE, 32, 32_768, trainer=FULL | {"activation_offload": True, "optimizer_offload": True}
    ),
    "dense, LoRA": TraceCase(LARGE, 8, 16_384, trainer=FULL, others=LORA),
    "mixture": TraceCase(MIXTURE, 64, 32_768, trainer=FULL),
    "mixture, two rows": TraceCase(MIXTURE, 64, 16_384, rows=2, trainer=FULL),
    "mixture, experts not distributed": TraceCase(
        MIXTURE, 64, 16_384, layout={"expert_parallel": 1}, trainer=FULL
    ),
    "mixture, LoRA": TraceCase(MIXTURE, 16, 16_384, trainer=FULL, others=LORA),
    "mixture, context": TraceCase(MIXTURE, 64, 131_072, layout={"context_parallel": 8}, trainer=FULL),
    "235B": TraceCase(BIG, 256, 16_384, trainer=FULL),
    "235B, HSDP, context, offload": TraceCase(
        BIG,
        512,
        65_536,
        layout={"replicate": 2, "context_parallel": 4},
        trainer=FULL | {"activation_offload": True},
    ),
    "DeepSeek-V3": TraceCase(DEEPSEEK, 1024, 16_384, layout={"expert_parallel": 64}, trainer=FULL),
}


def config_of(case: TraceCase) -> dict[str, Any]:
    """Return the model's config.json: weights of the trainer are not quantized."""
    from primerl_hpc.plan.predict.shape import known_config

    config = known_config(case.model)
    config.pop("quantization_config", None)
    return config if case.layers is None else config | {"num_hidden_layers": case.layers}


def make_recipe(case: TraceCase, folder: Path) -> Any:
    from primerl_hpc.recipe.load import parse_recipe

    config = config_of(case)
    (folder / "config.json").write_text(json.dumps(config))
    return parse_recipe(
        {
            "kind": "sft",
            "name": "trace",
            "model": {"name": str(folder)},
            "max_steps": 10,
            "seq_len": case.seq_len,
            "sft": {"data": {"path": "none"}},
            "trainer": {"compile": False, **case.trainer},  # graphs hide what is alive
            "layout": {"trainer": case.layout},
            **case.others,
        }
    )


def make_rows(case: TraceCase) -> list[Any]:
    """Return rows of one sample each, sampled and trained as in RL."""
    import numpy as np

    from primerl_hpc.transport.rollouts.micro_batch import MicroBatch

    size = case.seq_len
    streams = {
        name: np.ones(1, np.float32)
        for name in ("temperatures", "advantages", "rl_weights", "ref_kl_weights")
    }
    row = MicroBatch(
        input_ids=np.zeros(size, np.int32),
        loss_mask=np.ones(size, np.bool_),
        inference_logprobs=np.zeros(size, np.float32),
        sample_lengths=np.array([size]),
        env_ids=np.zeros(1, np.int32),
        **streams,
    )
    return [row] * case.rows


def predicted_memory(case: TraceCase) -> Any:
    """Return the planner's figures for a case."""
    from primerl_hpc.plan.predict.layouts import FORWARD_TOKENS, TrainerSetup
    from primerl_hpc.plan.predict.memory_trainer import trainer_memory
    from primerl_hpc.plan.predict.shape import shape_of

    shape, options = shape_of(config_of(case), case.model), case.trainer
    policy = options["activation_checkpointing"]
    replicate = case.layout.get("replicate", 1)
    micro_rows = min(case.rows, max(1, FORWARD_TOKENS // case.seq_len))
    setup = TrainerSetup(
        ranks=case.ranks,
        ranks_per_node=8,
        seq_len=case.seq_len,
        shard=case.ranks // replicate,
        replicate=replicate,
        context_parallel=case.layout.get("context_parallel", 1),
        expert_parallel=case.layout.get("expert_parallel", 8 if shape.is_mixture else 1),
        micro_rows=micro_rows,
        micro_batches=-(-case.rows // micro_rows),
        checkpointing=policy if isinstance(policy, str) else "selective",
        checkpointed_modules=() if isinstance(policy, str) else tuple(policy),
        activation_offload=options.get("activation_offload", False),
        optimizer_offload=options.get("optimizer_offload", False),
        lora_rank=case.others["lora"]["rank"] if "lora" in case.others else None,
    )
    return trainer_memory(shape, setup)


def run_case(name: str, top: int, layers: int | None) -> dict[str, Any]:
    """Trace one case in this process, where `load` was called."""
    from step_tracer import trace_steps

    case = replace(CASES[name], layers=layers) if layers else CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        recipe = make_recipe(case, Path(folder))
        found = trace_steps(
            recipe, Path(folder), make_rows(case), ranks=case.ranks, ranks_per_node=8, with_snapshot=top > 0
        )
    predicted = predicted_memory(case).allocated
    sent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for collective in found.collectives:
        sent[collective.name] += collective.num_bytes
        calls[collective.name] += 1
    for origin, size in found.snapshot.most_common(top):
        print(f"{size / GIB:8.3f} GiB  {origin}", file=sys.stderr)
    if top:
        for figure in predicted.walk():
            print(f"{figure.value / GIB:8.3f} {figure.name}", file=sys.stderr)
        print(found.waits, file=sys.stderr)
    return {
        "case": name,
        "model": case.model,
        "ranks": case.ranks,
        "tokens": case.seq_len * case.rows,
        "peak_gib": round(found.peak / GIB, 3),
        "predicted_gib": round(predicted.value / GIB, 3),
        "error": round(predicted.value / found.peak - 1, 4),
        "phase": found.peak_phase,
        "collectives": dict(calls),
        "sent_gib": {key: round(value / GIB, 3) for key, value in sent.items()},
        "waits": sum(found.waits.values()),
        "waits_outside": sum(
            number for (what, _), number in found.waits.items() if what != "sizes of the all-to-all"
        ),
    }


def load() -> None:
    """Import what every case needs. A case then forks this process, which takes no time."""
    fake_gpu.load()
    import step_tracer  # noqa: F401

    from primerl_hpc.trainer import train_step  # noqa: F401


def fork_case(name: str, top: int, layers: int | None) -> tuple[int, str]:
    """Trace one case in a child. Returns its exit code and its row as JSON."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with open(writing, "w") as row:
                json.dump(run_case(name, top, layers), row)
        except BaseException:  # noqa: BLE001  the child must not trace the next case
            traceback.print_exc()
            os._exit(1)
        os._exit(0)  # modules that believe in the GPU would fail while they are finalized
    os.close(writing)
    with open(reading) as row:
        text = row.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--top", type=int, default=0, help="print so many groups of tensors alive at the peak"
    )
    parser.add_argument("--layers", type=int, help="trace models of so many layers instead of all")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    load()
    rows, wrong = [], []
    for name in options.cases:
        code, text = fork_case(name, options.top, options.layers)
        if code:
            wrong.append(f"{name}: exit code {code}")
            continue
        row = json.loads(text)
        rows.append(row)
        if abs(row["error"]) > LARGEST_ERROR:
            wrong.append(f"{name}: the predicted peak differs by {row['error']:+.1%}")
    code = conclude("The trainer's step on a fake GPU", rows, wrong, as_json=options.json)
    sys.stdout.flush()
    os._exit(code)  # as above


if __name__ == "__main__":
    main()
