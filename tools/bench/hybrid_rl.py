#!/usr/bin/env python3
"""Train tiny hybrid models (attention and layers with state) by RL with real vLLM engines on two CPU cores.

    tools/bench/hybrid_rl.py --out docs/measurements/hybrid_rl.json      # every family, about nine minutes each
    tools/bench/hybrid_rl.py --families qwen3_next --set max_steps=2     # one of them, shorter

Each run is the recipe reverse_text/tiny with a model of random weights: SFT on demonstrations that are partly wrong,
then RL without staleness, so that the mismatch KL shows the difference of engine and trainer alone. Both compute in
bfloat16. Exits with 1 if a run fails, if the held-out reward rises by less than 0.2, or if the mismatch KL of a step
exceeds 1e-3.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import ROOT, describe_machine

sys.path.insert(0, str(ROOT))

from primerl_hpc.common.names import RunState
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir

RISE, MISMATCH = 0.2, 1e-3
DTYPE = "bfloat16"
"""vLLM's CPU kernels of layers with state compute in no other type."""
COMMON = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 128,  # vLLM's CPU kernel refuses 32
    "linear_value_head_dim": 128,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS,
    "qwen3_next": DELTA | EXPERTS,
}


def make_model(folder: Path, family: str) -> int:
    """Create demonstrations, the tokenizer and a random model. Return the number of parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    command = [sys.executable, str(ROOT / "tools" / "tiny-model"), str(folder)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    shutil.rmtree(folder / "model")
    tokens = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **COMMON | tokens | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return sum(parameter.numel() for parameter in model.parameters())


def train(family: str, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Run the recipe in ``folder`` and return the row of the result."""
    size = make_model(folder / "outputs" / "tiny", family)
    settings = [
        f"model.dtype={DTYPE}",
        f"trainer.param_dtype={DTYPE}",
        "rollouts.max_off_policy_steps=0",
        # vLLM caches prefixes of layers with state only with chunked prefill, which engines on CPUs do not use
        "inference.extra_args={enable-prefix-caching: false}",
    ]
    words = [word for text in (*settings, *overrides) for word in ("--set", text)]
    root = folder / "runs" / family
    command = ["submit", "reverse_text/tiny", "-p", "local", "--run-dir", str(root), "--follow", *words]
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "PRIMERL_HOME": str(folder / "state"),
    }
    start = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "primerl_hpc", *command],
        cwd=folder,
        env=environ,
        stdout=sys.stderr,
        check=False,
    )
    wall_s = time.monotonic() - start
    row = {"family": family, "parameters": size, "dtype": DTYPE, "wall_s": round(wall_s, 1)}
    return {**row, **measured(RunDir(root))}


def measured(run: RunDir) -> dict[str, Any]:
    state = take_snapshot(run).state
    if state != RunState.DONE:
        return {"state": state, "is_met": False}
    evaluations = read_steps(run.metrics("eval"))
    scores = [evaluations[version]["eval/held-out/reward/mean"] for version in sorted(evaluations)]
    mismatch = [row["mismatch_kl/all/mean"] for row in read_steps(run.metrics("trainer")).values()]
    batches = read_steps(run.metrics("orchestrator")).values()
    return {
        "state": state,
        "steps": len(mismatch),
        "held_out_before": round(scores[0], 3),
        "held_out_after": round(scores[-1], 3),
        "mismatch_kl_max": max(mismatch),
        "mismatch_kl_mean": sum(mismatch) / len(mismatch),
        "age_max": max(row["off_policy/max"] for row in batches),
        "is_met": scores[-1] >= scores[0] + RISE and max(mismatch) <= MISMATCH,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--folder", type=Path, help="keep everything here [default: a temporary folder]")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="hybrid-") as temporary:
        for family in options.families:
            folder = (options.folder or Path(temporary)).resolve() / family
            folder.mkdir(parents=True, exist_ok=True)
            rows.append(train(family, folder, options.overrides))
            print(json.dumps(rows[-1]), flush=True)
    if options.out:
        record = {
            "command": f"tools/bench/hybrid_rl.py --out {options.out}",
            **describe_machine(),
            "rows": rows,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(row["is_met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
