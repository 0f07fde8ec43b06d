"""Models and recipes of `tools/bench/loop.py`: three sizes of the same task, reverse-text, and one of several turns.

    prepare(folder, SIZES["256"], steps=8)      # → folder/model-256 and folder/256.yaml

The weights are random. Rollouts of the sizes 7 and 256 have exactly that many tokens: the stop token is made
impossible. Rollouts of size 90 end when the model samples the stop token, after about 90 tokens on average.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import ROOT

GROUP = 8
MAX_POSITIONS = 2048
LEARNING_RATE = 1e-6
"""Small enough that the length of rollouts stays the same over a run."""


@dataclass(frozen=True)
class Size:
    tokens: int
    """Maximum number of sampled tokens of a rollout."""
    batch: int
    """Rollouts of a step."""
    hidden: int
    layers: int
    is_fixed: bool
    """True if every rollout has ``tokens`` tokens."""
    steps: int
    ranks: int
    micro_batch: int
    """Samples of a micro-batch in the bare step and in TRL."""
    turns: int = 1
    """Turns of a rollout, each of ``tokens`` tokens. More than one: alphabet-sort, not for TRL and bare parts."""


SIZES = {
    "7": Size(7, 128, hidden=128, layers=2, is_fixed=True, steps=28, ranks=1, micro_batch=128),
    "10x7": Size(7, 64, hidden=128, layers=2, is_fixed=True, steps=16, ranks=1, micro_batch=64, turns=10),
    "90": Size(256, 64, hidden=256, layers=4, is_fixed=False, steps=20, ranks=1, micro_batch=16),
    "256": Size(256, 64, hidden=256, layers=4, is_fixed=True, steps=12, ranks=1, micro_batch=16),
}


def model_of(folder: Path, name: str) -> Path:
    return folder / f"model-{name}" / "model"


def prepare(folder: Path, name: str, steps: int) -> Path:
    """Create model and recipe of a size, and return the recipe's path. An existing model is kept."""
    size, model = SIZES[name], model_of(folder, name)
    if not model.exists():
        shape = ["--hidden", str(size.hidden), "--layers", str(size.layers), "--rows", "8"]
        subprocess.run(
            [sys.executable, str(ROOT / "tools/tiny-model"), str(model.parent), *shape],
            check=True,
            stdout=sys.stderr,
        )
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_POSITIONS}))
        if size.is_fixed:
            exclude_stop_token(model)
    recipe = folder / f"{name}.yaml"
    recipe.write_text(json.dumps(recipe_of(model, size, steps)))
    return recipe


def exclude_stop_token(folder: Path) -> None:
    """Change a model so that it never samples its stop token: one hidden feature is a large constant, and only the
    stop token's logit depends on it.
    """
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    stop = json.loads((folder / "config.json").read_text())["eos_token_id"]
    tensors["model.embed_tokens.weight"][:, 0] = 1.0
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0.0
    head = tensors["lm_head.weight"]
    head[:, 0] = 0.0
    head[stop, 0] = -1e3
    save_file(tensors, path, metadata={"format": "pt"})


def recipe_of(model: Path, size: Size, steps: int) -> dict[str, Any]:
    return {
        "kind": "rl",
        "name": "bench-loop",
        "model": {"name": str(model), "dtype": "float32", "renderer": {"name": "chatml"}},
        "seq_len": 16 * ((size.tokens + 40) // 16 + 1) if size.tokens > 100 else 128 * size.turns,
        "max_steps": steps,
        "inference": {"kv_cache_gib": 0.125 if size.tokens < 100 else 1.0},
        "layout": {"inference": {"replicas": 1}, "trainer": {"ranks": size.ranks}},
        "environments": {"train": [environment_of(size)]},
        "rollouts": {
            "batch_size": size.batch,
            "group_size": GROUP,
            "max_off_policy_steps": 2,
            "sampling": {"temperature": 1.0, "max_tokens": size.tokens},
        },
        "algorithm": {"type": "grpo_std"},
        "loss": {"type": "dppo", "mask_low": 0.2, "mask_high": 0.2, "kl_tau": 0.001},
        "optimizer": {"type": "adamw", "lr": LEARNING_RATE, "weight_decay": 0.0, "betas": [0.9, 0.95]},
        "scheduler": {"type": "constant", "warmup_steps": 5},
        "trainer": {"param_dtype": "float32", "activation_checkpointing": "none"},
        "checkpoint": {"interval": 1000, "keep_last": 1, "at_end": False},
    }


def environment_of(size: Size) -> dict[str, Any]:
    if size.turns == 1:
        return {"id": "reverse-text", "args": {"split": "train"}}
    return {"id": "alphabet-sort", "args": {"turns": size.turns, "names_per_turn": 1}}


def prompts(count: int) -> list[str]:
    """Return ``count`` prompts of the task, each repeated for its group."""
    from primerl_hpc.envs.shipped.reverse_text import ReverseTextConfig, draw_words

    words = list(draw_words(ReverseTextConfig(num_tasks=max(1, count // GROUP))))
    return [word for word in words for _ in range(GROUP)][:count]
