#!/usr/bin/env python3
"""Measure mismatch KL between vLLM's engine and the trainer's forward, for data types of both.

    tools/bench/mismatch.py                          # a random Qwen3 of 4 layers on the CPU
    tools/bench/mismatch.py --json out.json

Measured as by ``primerl-hpc doctor --mismatch``, also with each entry of `FLOAT32`. The KL is that of the trainer's
metrics (``mismatch_kl/all/mean``). Weights are random: only comparisons between rows are meaningful.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from machine import ROOT, describe_machine

sys.path.insert(0, str(ROOT))

from primerl_hpc.common.log import notice
from primerl_hpc.launch.doctor.mismatch import measure_mismatch

FLOAT32 = ((), ("head",), ("norm",), ("head", "norm"))
SHAPE = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 256, "pad_token_id": None,
}  # fmt: skip


def make_model(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SHAPE), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else 0.05))
    model.save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model)
        found = measure_mismatch(str(model), float32=FLOAT32, report=notice)
    for row in found.rows:
        print(
            f"{row['dtype']:<9} float32: {','.join(row['float32']) or '-':<10} mismatch KL {row['mismatch_kl']:.3e}"
        )
    if options.json is not None:
        import torch
        import vllm

        facts = describe_machine() | {"torch": torch.__version__, "vllm": vllm.__version__}
        facts |= {"tokens": found.rows[0]["tokens"], "model": {"family": "qwen3", **SHAPE}}
        options.json.write_text(
            json.dumps({"command": "tools/bench/mismatch.py", **facts, "rows": found.rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
