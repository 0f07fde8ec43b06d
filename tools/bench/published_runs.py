#!/usr/bin/env python3
"""Run SFT, RL with an engine, update and export for tiny models with the configuration of published families.

    tools/bench/published_runs.py                                  # all families, about a minute each
    tools/bench/published_runs.py --families gemma3 llama4 --json

20 steps of SFT, 4 steps of RL on reverse-text with rollouts of the present policy, then `export`; transformers loads
the exported folder. Columns: largest mismatch KL of a step (engine against trainer, also after updates), tensors in
the export and those copied from the base model. In bfloat16, where vLLM's CPU kernels compute nothing else, at most
2e-2 instead of 1e-4. Exits with 1 if more is found or a run is not done.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from listeners import RL
from machine import ROOT, conclude

from primerl_hpc.common.files import read_json, read_json_or_none
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from tests.support.served_updates import HALF, MEASURED, SERVED, make_model
from tests.support.tiny_models import auto_model

MAX_KL, MAX_KL_HALF = 1e-4, 2e-2
FAMILIES = (
    "qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "llama4", "mistral3", "nemotron_h", "gpt_oss", "afmoe",
    "granitemoehybrid", "qwen3_next", "qwen3_vl_moe",
)  # fmt: skip
SETTINGS = (
    "warmup.max_steps=20", "max_steps=4", "rollouts.async_level=0", "rollouts.batch_size=32", "environments.eval=[]",
    "checkpoint.interval=null", "seq_len=128", "layout.trainer.ranks=2", "trainer.vision=none",
)  # fmt: skip


def run(family: str, folder: Path) -> dict[str, Any]:
    """Train a model of ``family`` in ``folder``, which has the tokenizer and data of tools/tiny-model."""
    model = folder / family
    size = len(read_json(folder / "tiny/model/tokenizer.json")["model"]["vocab"]) + 8
    make_model(
        model, family, seed=1, vocab_size=size, max_position_embeddings=256, vocab_size_per_layer_input=size
    )
    for path in (folder / "tiny/model").glob("*token*"):
        (model / path.name).write_bytes(path.read_bytes())
    dtype = "bfloat16" if family in HALF else "float32"
    settings = [f"model.name={model}", f"model.dtype={dtype}", f"trainer.param_dtype={dtype}", *SETTINGS]
    words = [word for text in settings for word in ("--set", text)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    root, exported = folder / "runs" / family, folder / "exported" / family

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "primerl_hpc", *arguments], cwd=folder, env=environment, check=False,
            stdout=subprocess.PIPE, stderr=sys.stderr, text=True,
        )  # fmt: skip

    command("submit", RL, "-p", "local", "--run-dir", str(root), *words, "--follow")
    done = (read_json_or_none(RunDir(root).state) or {}).get("state") == "done"
    row: dict[str, Any] = {"family": family, "dtype": dtype, "done": done}
    if done:
        steps = read_steps(RunDir(root).metrics("trainer")).values()
        said = json.loads(command("export", str(root), "--to", str(exported), "--json").stdout)
        loaded, report = auto_model(family).from_pretrained(exported, output_loading_info=True)
        index = read_json(exported / "model.safetensors.index.json")["weight_map"]
        row |= {
            "steps": len(steps),
            "mismatch KL": max(step["mismatch_kl/all/mean"] for step in steps),
            "tensors": len(index),
            "copied": said["copied_tensors"],
            "loaded": not report["missing_keys"] and not report["unexpected_keys"] and loaded is not None,
        }
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=sorted(SERVED | MEASURED), default=list(FAMILIES))
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="bench-published-") as name:
        folder = Path(name)
        subprocess.run(
            [str(ROOT / "tools" / "tiny-model"), "tiny"], cwd=folder, check=True, stdout=sys.stderr
        )
        (folder / "outputs").symlink_to(folder)  # the recipe's demonstrations are outputs/tiny/sft.jsonl
        for family in options.families:
            row = run(family, folder)
            limit = MAX_KL_HALF if row["dtype"] == "bfloat16" else MAX_KL
            is_met = bool(row.get("loaded")) and row["mismatch KL"] <= limit
            rows.append(row | {"is_met": is_met})
            wrong += [] if is_met else [f"{family}: {row}"]
            print(rows[-1], file=sys.stderr, flush=True)
    return conclude("Complete runs of published families", rows, wrong, as_json=options.as_json)


if __name__ == "__main__":
    sys.exit(main())
