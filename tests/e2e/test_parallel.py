"""Every layout computes what one rank computes: losses, gradients, weights, exports, checkpoints. Tiny models in
float32 with gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402

from primerl_hpc.common.names import Role  # noqa: E402
from primerl_hpc.export.merge import merge_adapter  # noqa: E402
from primerl_hpc.run.metrics import read_steps  # noqa: E402
from primerl_hpc.run.rundir import RunDir  # noqa: E402
from primerl_hpc.transport.base_models.untrained import is_tower_tensor  # noqa: E402
from tests.e2e.test_trainer import curve, make_run, rl_recipe, send, sft_recipe  # noqa: E402
from tests.support.checksums import verify_checksums  # noqa: E402
from tests.support.helpers import ROOT, end_role, make_tiny_model, wait_for  # noqa: E402
from tests.support.parallel_ranks import SAVED_STEP, STEPS, batch  # noqa: E402
from tests.support.tiny_models import COMPOSITES, FAMILIES, make_family, make_vision_language  # noqa: E402

pytestmark = pytest.mark.e2e

DIVIDED = ("phi", "qwen2", "gemma2", "gemma3_text", "phi3", "glm4")
"""Families for tensor parallelism besides `FAMILIES`: with biases also in the head, caps and a scaled table that is
the head, fused matrices."""
ATTENTIONS = ("qwen3", "llama", "deepseek_v3", "gpt_oss", "gemma2", "llama4_text")
"""Families whose attention differs: norms of heads, none, values of another width, sinks and windows, caps, chunks."""
STATEFUL = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "nemotron_h", "granitemoehybrid", "lfm2")
"""Families with layers that carry state along a row."""
ALL_AXES = ("expert", "tensor", "ulysses", "ring")
DENSE_AXES, EXPERT_AXES = ALL_AXES[1:], ("expert", "ulysses", "ring")
PUBLISHED = {
    "afmoe": EXPERT_AXES, "laguna": ALL_AXES, "minimax_m2": EXPERT_AXES, "glm_moe_dsa": ("expert",),
    "deepseek_v32": ("expert",), "exaone_moe": ALL_AXES, "hy_v3": ALL_AXES, "solar_open": ALL_AXES,
    "mixtral": ALL_AXES, "gemma3": DENSE_AXES, "gemma4": ("ulysses", "ring"), "mistral3": DENSE_AXES,
    "llama4": DENSE_AXES, "qwen3_vl_moe": ALL_AXES, "kimi_k25": ALL_AXES, "qwen3_5": ("ulysses", "ring"),
    "qwen3_5_moe": EXPERT_AXES, "kimi_linear": ("expert",), "olmo_hybrid": ("shard",), "ministral3": DENSE_AXES,
    "mistral": DENSE_AXES, "seed_oss": DENSE_AXES, "smollm3": DENSE_AXES,
}  # fmt: skip
"""Axes of more families that users bring."""
REFERENCES = (*FAMILIES, *DIVIDED, "llama4_text", *STATEFUL, *PUBLISHED)
MOE = [family for family in FAMILIES if family not in ("qwen3", "llama")]
REFERENCE = {f"{family}-1": {"model": family, "ranks": 1, "is_supervised": True} for family in FAMILIES}
ONE_BY_ONE = {"seq_len": 4096}
LORA = {
    "lora": {"rank": 8, "alpha": 12.0}, "model": "qwen3_moe", "is_supervised": True, "reference": "lora-1",
}  # fmt: skip
LORA_DENSE = {
    "model": "qwen3", "is_supervised": True, "reference": "lora-dense-1",
    "lora": {"rank": 3, "target_modules": ["q_proj", "mlp.down_proj"]},
}  # fmt: skip
TIED = {"model": "tied", "is_supervised": True, "reference": "tied-1"}
"""A qwen3 whose head is the table of its embeddings: one gradient, the sum of two."""
TIED_LORA = {**LORA_DENSE, "model": "tied", "reference": "lora-tied-1"}

CUSTOM = {
    "model": "llama", "reference": "custom-1",
    "loss": {"type": "custom", "import_path": "tests.support.parallel_ranks:reinforce", "kwargs": {"scale": 0.5}},
}  # fmt: skip

VISION = {"model": "qwen3_vl", "trainer": {"vision": "trained"}, "reference": "vision-1", **ONE_BY_ONE}
BALANCED = {"model": "deepseek_v3", "trainer": {"router_bias_rate": 0.05}, "reference": "balanced-1"}
REPLAY = {"model": "glm4_moe", "trainer": {"router_replay": True}, "reference": "replay-1"}

# each optimizer trains under replicate × data × expert, and with its state in each place
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 0.01},
    "muon": {"lr": 0.01},
    "sgd": {"lr": 0.5},
    "sign_sgd": {"lr": 0.01},
}
OPTIMIZED = {
    name: {"model": "qwen3_moe", "optimizer": {"type": name, **options}, "reference": f"{name}-1"}
    for name, options in OPTIMIZERS.items()
}
AXES: dict[str, dict[str, Any]] = {
    "shard": {"expert_parallel": 1}, "tensor": {"tensor_parallel": 2}, "ulysses": {"context_parallel": 2},
    "expert": {"expert_parallel": 2}, "ring": {"context_parallel": 2, "context_style": "ring"},
}  # fmt: skip
WITHOUT_TOWER: dict[str, Any] = {"trainer": {"vision": "none"}}
OF_PUBLISHED = {
    f"{family}-{axis}-2": {
        "model": family, "ranks": 2, "layout": AXES[axis], "is_exported": axis == axes[0], **WITHOUT_TOWER,
    }
    for family, axes in PUBLISHED.items()
    for axis in axes
}  # fmt: skip
FUSED = {
    f"muon-{family}-{axis}-2": {
        "model": family, "ranks": 2, "layout": AXES[axis], "optimizer": {"type": "muon", "lr": 0.002},
        "reference": f"muon-{family}-1",
    }
    for family, axes in {"phi3": ("shard", "tensor", "ulysses"), "deepseek_v3": AXES}.items()
    for axis in axes
}  # fmt: skip
"""Muon splits fused matrices along each axis: QKV, gate and up; experts and latent attention. Its iteration enlarges
rounding of small singular values, hence the small rate."""
PLACES = {"optimizer-offload": {"optimizer_offload": True}, "cpu-offload": {"cpu_offload": True}}

DEEP_EP = {
    "model": "qwen3_moe", "ranks": 2, "trainer": {"param_dtype": "bfloat16"},
    "layout": {"expert_parallel": 2, "expert_backend": "deepep"},
}  # fmt: skip

FLOAT16: dict[str, dict[str, Any]] = {
    "float16-tensor-2-ulysses-2": {
        "model": "qwen3", "ranks": 4, "layout": {"tensor_parallel": 2, "context_parallel": 2}, "reference": "qwen3-rl",
        "trainer": {"float32": ["head", "norm"]},
    },
    "float16-expert-2": {
        "model": "qwen3_moe", "ranks": 2, "layout": {"expert_parallel": 2}, "reference": "float16-expert-1",
        "trainer": {"float32": ["router", "head", "norm"], "activation_checkpointing": "full"},
    },
    "float16-tied-2": {**TIED, "ranks": 2, "trainer": {"float32": ["head"]}},
    "float16-lora-2": {**LORA_DENSE, "ranks": 2, "trainer": {"float32": ["head", "norm"]}},
}  # fmt: skip
WIDE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64, "moe_intermediate_size": 64}
"""Sizes of a mixture whose matrices, also divided by two, are multiples of the 32 values that share a scale."""
FP8 = {"model": "wide", "trainer": {"fp8": "mxfp8", "param_dtype": "bfloat16"}}
IN_FP8 = {
    "fp8-shard-2": {**FP8, "ranks": 2, "layout": {"expert_parallel": 1}},
    "fp8-expert-2": {**FP8, "ranks": 2, "layout": {"expert_parallel": 2}},
    "fp8-tensor-2": {**FP8, "ranks": 2, "layout": {"tensor_parallel": 2}},
    "fp8-ulysses-2": {**FP8, "ranks": 2, "layout": {"context_parallel": 2, "context_style": "ulysses"}},
}

# fmt: off
LAYOUTS: dict[str, dict[str, Any]] = {
    # each axis alone; context also with a loss over complete samples
    "shard-2": {"model": "qwen3", "ranks": 2},
    "replicate-2": {"model": "qwen3", "ranks": 2, "layout": {"replicate": 2}},
    **{
        f"{name}-expert-2": {"model": name, "ranks": 2, "layout": {"expert_parallel": 2}, "is_exported": True}
        for name in MOE
    },
    "auto-2": {"model": "qwen3_moe", "ranks": 2},
    **{
        f"{name}-{style}-2": {
            "model": name,
            "ranks": 2,
            "layout": {"context_parallel": 2, "context_style": style},
            **({"loss": {"type": "gspo"}, "reference": "gspo-1", "is_exported": True} if name == "llama" else {}),
        }
        for name in ATTENTIONS
        for style in ("ulysses", "ring")
    },
    **{
        f"{name}-tensor-2": {"model": name, "ranks": 2, "layout": {"tensor_parallel": 2}, "is_exported": True}
        for name in (*FAMILIES, *DIVIDED)
    },
    "supervised-ulysses-2": {
        "model": "qwen3", "ranks": 2, "layout": {"context_parallel": 2}, "is_supervised": True, "reference": "qwen3-1",
    },
    "custom-loss-ring-2": {**CUSTOM, "ranks": 2, "layout": {"context_parallel": 2, "context_style": "ring"}},
    "tied-shard-2": {**TIED, "ranks": 2, "is_exported": True},
    "tied-large-2": {**TIED, "ranks": 2, **ONE_BY_ONE, "is_large": True},
    "lora-tied-2": {**TIED_LORA, "ranks": 2, "is_exported": True},
    **OF_PUBLISHED,
    # compositions
    "expert-3-of-8": {"model": "qwen3_moe", "ranks": 3, "layout": {"expert_parallel": 3}},
    "auto-3": {"model": "qwen3_moe", "ranks": 3},
    "absent-deepep": DEEP_EP,
    "replay-ring-2-expert-2": {
        **REPLAY, "ranks": 2, "layout": {"context_parallel": 2, "context_style": "ring", "expert_parallel": 2},
    },
    "replay-ulysses-2-compiled": {
        **REPLAY, "ranks": 2, "layout": {"context_parallel": 2},
        "trainer": {"router_replay": True, "compile": True}, "compiler": "aot_eager",
    },
    # images on one of two ranks, and on each in turn
    "vision-2": {**VISION, "ranks": 2, "is_exported": True},
    "vision-frozen-2": {"model": "qwen3_vl", "ranks": 2, **ONE_BY_ONE, "reference": "vision-frozen-1"},
    "vision-shared": {**VISION, "ranks": 2, "layout": {"context_parallel": 2}},
    "state-expert-2": {
        "model": "qwen3_5_moe_text", "ranks": 2, "layout": {"expert_parallel": 2}, "is_exported": True,
        "trainer": {"activation_checkpointing": "full"},
    },
    # heads of layers with state among the ranks of a row; with 3 ranks no number of heads divides
    **{
        f"{name}-{style}-2": {
            "model": name, "ranks": 2, "layout": {"context_parallel": 2, "context_style": style, **layout},
        }
        for name, style, layout in (
            ("qwen3_5_text", "ulysses", {}),
            ("qwen3_5_moe_text", "ulysses", {"expert_parallel": 2}),
            ("qwen3_next", "ring", {}),
            ("nemotron_h", "ulysses", {}),
            ("granitemoehybrid", "ulysses", {}),
            ("lfm2", "ring", {}),
        )
    },
    "state-ring-3": {
        "model": "qwen3_5_text", "ranks": 3, "layout": {"context_parallel": 3, "context_style": "ring"},
        "trainer": {"activation_checkpointing": "full"},
    },
    "state-ring-4-of-2-groups": {
        "model": "nemotron_h", "ranks": 4, "layout": {"context_parallel": 4, "context_style": "ring"},
    },
    "state-divided": {"model": "qwen3_5_moe_text", "ranks": 2, "layout": {"tensor_parallel": 2}},
    "layer-tables-divided": {"model": "gemma4", "ranks": 2, "layout": {"tensor_parallel": 2}},
    "indexed-shared": {"model": "glm_moe_dsa", "ranks": 2, "layout": {"context_parallel": 2}},
    "no-experts": {"model": "llama", "ranks": 2, "layout": {"expert_parallel": 2}},
    "shard-2-expert-2": {"model": "gpt_oss", "ranks": 4, "layout": {"expert_parallel": 2}},
    "replicate-2-expert-2": {
        "model": "qwen3_moe",
        "ranks": 4,
        "layout": {"replicate": 2, "expert_parallel": 2},
        "save_to": "saved",
    },
    "replicate-2-expert-4": {
        "model": "qwen3_moe",
        "ranks": 8,
        "layout": {"replicate": 2, "expert_parallel": 4},
        "resume_from": "saved",
    },
    "replicate-2-shard-2-expert-2": {
        "model": "qwen3_moe",
        "ranks": 8,
        "layout": {"replicate": 2, "expert_parallel": 2},
        "trainer": {"activation_checkpointing": "full"},
    },
    "ulysses-3-of-4-heads": {
        "model": "qwen3", "ranks": 3, "layout": {"context_parallel": 3, "context_style": "ulysses"},
    },
    "context-3-by-ring": {"model": "qwen3", "ranks": 3, "layout": {"context_parallel": 3}},
    "ulysses-4-of-2-key-heads": {"model": "qwen3", "ranks": 4, "layout": {"context_parallel": 4}},
    "ring-2-replicate-2": {
        "model": "qwen3", "ranks": 4, "layout": {"context_parallel": 2, "context_style": "ring", "replicate": 2},
    },
    "ulysses-2-expert-4": {
        "model": "deepseek_v3", "ranks": 4, "layout": {"context_parallel": 2, "expert_parallel": 4},
    },
    "ring-4-expert-2": {
        "model": "gpt_oss", "ranks": 4,
        "layout": {"context_parallel": 4, "context_style": "ring", "expert_parallel": 2},
    },
    "replicate-2-ulysses-2-expert-2": {
        "model": "glm4_moe", "ranks": 4, "layout": {"replicate": 2, "context_parallel": 2, "expert_parallel": 2},
    },
    "replicate-2-shard-2-ring-2-expert-4": {
        "model": "qwen3_moe", "ranks": 8,
        "layout": {"replicate": 2, "context_parallel": 2, "context_style": "ring", "expert_parallel": 4},
        "trainer": {"activation_checkpointing": "full"}, "is_exported": True,
    },
    "expert-8": {"model": "qwen3_moe", "ranks": 8, "layout": {"expert_parallel": 8}, "is_exported": True},
    # divided matrices
    "shard-2-tensor-2": {
        "model": "qwen3", "ranks": 4, "layout": {"tensor_parallel": 2}, "is_exported": True, "save_to": "saved-divided",
    },
    "replicate-2-tensor-2": {
        "model": "qwen3", "ranks": 4, "layout": {"replicate": 2, "tensor_parallel": 2},
        "trainer": {"activation_checkpointing": "full"},
    },
    "tensor-4-of-2-key-heads": {
        "model": "qwen3", "ranks": 4, "layout": {"tensor_parallel": 4}, "resume_from": "saved-divided",
    },
    "one-rank-from-tensor-2": {"model": "qwen3", "ranks": 1, "resume_from": "saved-divided"},
    "tensor-3-of-4-heads": {"model": "qwen3", "ranks": 3, "layout": {"tensor_parallel": 3}},
    "undivided-attention": {"model": "olmo2", "ranks": 2, "layout": {"tensor_parallel": 2}},
    "vision-divided": {**VISION, "ranks": 2, "layout": {"tensor_parallel": 2}},
    "supervised-tensor-2-ulysses-2": {
        "model": "qwen3", "ranks": 4, "layout": {"tensor_parallel": 2, "context_parallel": 2}, "is_supervised": True,
        "reference": "qwen3-1",
    },
    "tensor-2-ring-2": {
        "model": "gpt_oss", "ranks": 4,
        "layout": {"tensor_parallel": 2, "context_parallel": 2, "context_style": "ring", "expert_parallel": 2},
    },
    "tensor-2-expert-4-from-replicas": {
        "model": "qwen3_moe", "ranks": 4, "layout": {"tensor_parallel": 2, "expert_parallel": 4},
        "resume_from": "saved",
    },
    "balanced-expert-2": {**BALANCED, "ranks": 2, "layout": {"expert_parallel": 2}},
    "tensor-2-replay": {**REPLAY, "ranks": 2, "layout": {"tensor_parallel": 2}},
    "tensor-2-expert-2-compiled": {
        "model": "qwen3_moe", "ranks": 2, "layout": {"tensor_parallel": 2, "expert_parallel": 2},
        "trainer": {"compile": True}, "compiler": "aot_eager",
    },
    "lora-tensor-2": {**LORA, "ranks": 2, "layout": {"tensor_parallel": 2}, "is_exported": True},
    "lora-dense-tensor-2": {
        **LORA_DENSE, "ranks": 2, "layout": {"tensor_parallel": 2}, "is_exported": True,
    },
    # optimizers
    **FUSED,
    "muon-tensor-2-shard-2": {**OPTIMIZED["muon"], "ranks": 4, "layout": {"tensor_parallel": 2}},
    "adamw-tensor-2-offload": {
        **OPTIMIZED["adamw"], "ranks": 4, "layout": {"tensor_parallel": 2}, "trainer": PLACES["optimizer-offload"],
    },
    "adamw-tensor-2-cpu-offload": {
        **OPTIMIZED["adamw"], "ranks": 4, "layout": {"tensor_parallel": 2}, "trainer": PLACES["cpu-offload"],
    },
    **{
        f"{name}-replicate-2-expert-2": {**case, "ranks": 4, "layout": {"replicate": 2, "expert_parallel": 2}}
        for name, case in OPTIMIZED.items()
    },
    **{
        f"{name}-expert-2-{place}": {**case, "ranks": 2, "layout": {"expert_parallel": 2}, "trainer": options}
        for name, case in OPTIMIZED.items()
        for place, options in PLACES.items()
    },
    # adapters
    "lora-shard-2": {**LORA, "ranks": 2, "layout": {"expert_parallel": 1}, "is_exported": True},
    "lora-ulysses-2-expert-2": {**LORA, "ranks": 2, "layout": {"context_parallel": 2, "expert_parallel": 2}},
    "lora-expert-2": {**LORA, "ranks": 2, "layout": {"expert_parallel": 2}, "save_to": "saved-adapters"},
    "lora-replicate-2-expert-2": {
        **LORA, "ranks": 4, "layout": {"replicate": 2, "expert_parallel": 2},
        "trainer": {"activation_checkpointing": "full"}, "is_exported": True,
    },
    "lora-resumed": {**LORA, "ranks": 4, "layout": {"expert_parallel": 4}, "resume_from": "saved-adapters"},
    "lora-dense-2": {**LORA_DENSE, "ranks": 2, "is_exported": True},
    "lora-nowhere": {"model": "qwen3", "ranks": 2, "lora": {"target_modules": ["q_proj", "qkv"]}},
    "lora-odd-rank": {**LORA, "ranks": 2, "lora": {"rank": 12}},
    "lora-fused-files": {"model": "gpt_oss", "ranks": 2, "lora": {}},
    "lora-of-another-rank": {**LORA, "ranks": 4, "lora": {"rank": 16}, "resume_from": "saved-adapters"},
    "whole-from-adapters": {"model": "qwen3_moe", "ranks": 4, "resume_from": "saved-adapters"},
    "of-another-model": {"model": "glm4_moe", "ranks": 4, "resume_from": "saved"},
    "of-another-optimizer": {
        "model": "qwen3_moe", "ranks": 4, "resume_from": "saved", "optimizer": {"type": "sign_sgd"},
    },
    # accumulation and gathers
    "small": {"model": "qwen3", "ranks": 2, **ONE_BY_ONE, "is_counted": True, "trainer": {"gc_interval": 2}},
    "large": {"model": "qwen3", "ranks": 2, **ONE_BY_ONE, "is_counted": True, "is_large": True},
    "kept": {
        "model": "qwen3",
        "ranks": 2,
        **ONE_BY_ONE,
        "is_counted": True,
        "trainer": {"reshard_after_forward": False},
    },
    "whole": {
        "model": "qwen3",
        "ranks": 2,
        **ONE_BY_ONE,
        "is_counted": True,
        "trainer": {"reshard_after_forward": "auto"},
    },
    "whole-expert-2": {
        "model": "qwen3_moe",
        "ranks": 2,
        "layout": {"expert_parallel": 2},
        "trainer": {"reshard_after_forward": "auto"},
    },
    "large-replicated": {
        "model": "qwen3_moe",
        "ranks": 4,
        "layout": {"replicate": 2, "expert_parallel": 2},
        **ONE_BY_ONE,
        "is_counted": True,
        "is_large": True,
    },
    "one-rank-from-expert-2": {"model": "qwen3_moe", "ranks": 1, "resume_from": "saved"},
}
# fmt: on
REFUSED = {
    "state-divided": "has layers that carry state along a row",
    "layer-tables-divided": "has embeddings of each layer",
    "indexed-shared": "has layers that need complete rows",
    "lora-nowhere": "lora.target_modules names qkv, which no block of Qwen3ForCausalLM has",
    "lora-odd-rank": "lora.rank 12 must be a multiple of 8",
    "lora-fused-files": "hold all experts in one tensor",
    "lora-of-another-rank": "has adapters of rank 8, alpha 12, the recipe trains adapters of rank 16, alpha 32",
    "whole-from-adapters": "has adapters of rank 8, alpha 12, the recipe trains all weights",
    "of-another-model": "the checkpoint is damaged or belongs to another model",
    "of-another-optimizer": "the checkpoint has optimizer sgd, the recipe uses sign_sgd",
    "expert-3-of-8": "expert_parallel 3 does not divide the model's 8 experts",
    "absent-deepep": "DeepEP is not installed here",
    "vision-shared": "ranks cannot share rows with images",
    "tensor-3-of-4-heads": "tensor_parallel 3 does not divide the model's 4 attention heads and 2 key-value heads",
    "undivided-attention": "this version cannot divide the attention of Olmo2ForCausalLM",
    "vision-divided": "ranks cannot share rows with images",
    "no-experts": "expert_parallel is 2, but the model has no experts",
    "ulysses-3-of-4-heads": "4 attention heads and 2 key-value heads must be divided among 3 ranks",
}
EXPORTED = [name for name, case in LAYOUTS.items() if case.get("is_exported")]
ADAPTERS = [name for name in EXPORTED if "lora" in LAYOUTS[name]]


def features(case: dict[str, Any]) -> set[str]:
    """Return what a case combines: its family, its settings, pairs of axes, and each axis with the kind of family."""
    model, layout = case["model"], case.get("layout", {})
    kind = "state" if model in STATEFUL else "experts" if model in MOE else "dense"
    axes = sorted(axis for axis, degree in layout.items() if degree != 1)
    found = {f"{key}={value}" for block in (layout, case.get("trainer", {})) for key, value in block.items()}
    found |= {f"{key}={case[key]['type']}" for key in ("optimizer", "loss") if key in case}
    found |= {
        key for key, value in case.items() if key in ("lora", "resume_from", "save_to") or value is True
    }
    found |= {f"{first} with {second}" for first, second in combinations(axes, 2)}
    return found | {f"model={model}", *(f"{kind} with {axis}" for axis in axes)}


def covering(named: dict[str, dict[str, Any]]) -> set[str]:
    """Return cases that together have every feature of all cases; of equal ones, that with the fewest ranks."""
    missing = set().union(*(features(case) for case in named.values()))
    chosen: set[str] = set()
    while missing:
        best = max(named, key=lambda name: (len(features(named[name]) & missing), -named[name]["ranks"]))
        chosen.add(best)
        missing -= features(named[best])
    return chosen


TRAINED = {name: case for name, case in LAYOUTS.items() if name not in REFUSED}
COVERING = covering({name: case for name, case in TRAINED.items() if name not in OF_PUBLISHED}) | {
    "afmoe-expert-2", "minimax_m2-expert-2", "glm_moe_dsa-expert-2", "gemma4-ulysses-2", "qwen3_vl_moe-tensor-2",
}  # fmt: skip


def slow_unless(name: str, *in_gate: str) -> Any:
    """Return the parameter ``name``, marked slow unless it is one of ``in_gate``."""
    return pytest.param(name, marks=() if name in in_gate else pytest.mark.slow)


def in_gate(names: Iterable[str]) -> list[Any]:
    """Return parameters in which the layouts that `COVERING` leaves out are marked slow."""
    return [slow_unless(name, *COVERING) for name in names]


@dataclass
class Results:
    folder: Path

    def report(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / f"{name}.json").read_text())

    def tensors(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / f"{name}.safetensors")


def all_cases() -> dict[str, dict[str, Any]]:
    """Return the references of RL and SFT first, then layouts by number of ranks, and last the cases that resume."""
    named: dict[str, dict[str, Any]] = {}
    for name, case in REFERENCE.items():
        named[name] = case
    named["tied-1"], named["lora-tied-1"] = {**TIED, "ranks": 1}, {**TIED_LORA, "ranks": 1}
    for family in REFERENCES:
        named[f"{family}-rl"] = {
            "model": family,
            "ranks": 1,
            **(WITHOUT_TOWER if family in PUBLISHED else {}),
        }
    named["gspo-1"] = {"model": "llama", "ranks": 1, "loss": {"type": "gspo"}}
    named["custom-1"] = {**CUSTOM, "ranks": 1}
    named["replay-1"] = {**REPLAY, "ranks": 1}
    named["balanced-1"] = {**BALANCED, "ranks": 1}
    named["vision-1"] = {**VISION, "ranks": 1}
    named["vision-frozen-1"] = {"model": "qwen3_vl", "ranks": 1}
    named["half-1"] = {**DEEP_EP, "ranks": 1, "layout": {}}
    for name, case in OPTIMIZED.items():
        named[f"{name}-1"] = {**case, "ranks": 1}
    for case in FUSED.values():
        named[case["reference"]] = {**case, "ranks": 1, "layout": {}}
    named["lora-1"] = {**LORA, "ranks": 1}
    named["lora-dense-1"] = {**LORA_DENSE, "ranks": 1}
    named["lora-half-2"] = {**LORA, "ranks": 2, "trainer": {"param_dtype": "bfloat16"}}
    named["half-deepep-2"] = {**DEEP_EP, "has_deep_ep": True}
    for name, case in FLOAT16.items():
        named[name] = {**case, "trainer": {"param_dtype": "float16", **case.get("trainer", {})}}
    named["float16-expert-1"] = {**named["float16-expert-2"], "ranks": 1, "layout": {}}
    named |= {
        "plain-1": {**FP8, "ranks": 1, "trainer": {"param_dtype": "bfloat16"}},
        "fp8-1": {**FP8, "ranks": 1},
    }
    named |= IN_FP8
    is_last = [name for name, case in LAYOUTS.items() if case["ranks"] == 1]
    for name in sorted(LAYOUTS, key=lambda name: (name in is_last, LAYOUTS[name]["ranks"])):
        named[name] = LAYOUTS[name]
    return named


def cases_of(items: Iterable[pytest.Item]) -> dict[str, dict[str, Any]]:
    """Return the cases that tests name in their parameters, their references, and the cases from which they resume."""
    named = all_cases()
    wanted = {
        name
        for item in items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        for value in item.callspec.params.values()
        for name in ([value] if isinstance(value, str) else value if isinstance(value, tuple) else [])
    } & named.keys()
    wanted |= {reference_of(named[name]) for name in wanted if named[name]["ranks"] > 1} & named.keys()
    folders = {named[name].get("resume_from") for name in wanted}
    wanted |= {name for name, case in named.items() if case.get("save_to") in folders - {None}}
    return {name: case for name, case in named.items() if name in wanted}


def reference_of(case: dict[str, Any]) -> str:
    return case.get("reference", f"{case['model']}-rl")


SPECIAL_MODELS = {
    "tied": partial(make_family, "qwen3", tie_word_embeddings=True),
    "qwen3_vl": make_vision_language,
    "wide": partial(make_family, "qwen3_moe", **WIDE),
}
"""Models that are not named by their family."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Train the cases of the selected tests of this module."""
    folder = tmp_path_factory.mktemp("parallel")
    needed = cases_of(item for item in request.session.items if item.path == request.path)
    for model in {case["model"] for case in needed.values()}:
        SPECIAL_MODELS.get(model, partial(make_family, model))(folder / model)
    rows = [{"name": name, **case, "model": str(folder / case["model"])} for name, case in needed.items()]
    (folder / "cases.json").write_text(json.dumps(rows))
    log = folder / "ranks.log"
    with log.open("w") as file:
        ranks = subprocess.Popen(
            [sys.executable, "-m", "tests.support.parallel_ranks", str(folder)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def has_more_than(reports: int) -> bool:
        return ranks.poll() is not None or len(list(folder.glob("*.json"))) > reports

    try:
        while ranks.poll() is None:  # all cases together take minutes
            reports = len(list(folder.glob("*.json")))
            wait_for(partial(has_more_than, reports), f"the next case of {reports}", log.read_text)
    finally:
        end_role(ranks)
    assert ranks.returncode == 0, f"{ranks.returncode}: {log.read_text()[-6000:]}"
    return Results(folder)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], share: float = 1e-5) -> None:
    """Compare each tensor to within ``share`` of its norm."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert (found[name] - value).norm() <= share * value.norm(), name


@pytest.mark.parametrize("name", in_gate(TRAINED))
def test_losses_gradients_and_weights_equal_those_of_one_rank(results, name):
    case = LAYOUTS[name]
    reference = reference_of(case)
    found, expected = results.tensors(name), results.tensors(reference)
    steps, expected_steps = results.report(name)["steps"], results.report(reference)["steps"]
    if "resume_from" in case:  # its first gradients are those of step 3
        expected_steps = expected_steps[SAVED_STEP:]
        found, expected = (
            {key: value for key, value in each.items() if key.startswith("weight")}
            for each in (found, expected)
        )
    is_tight = "resume_from" in case and "lora" not in case  # B has grown from zero for three steps only
    assert_close(found, expected, 1e-6 if is_tight else 1e-5)
    for metrics, expected_metrics in zip(steps, expected_steps, strict=True):
        for key, value in expected_metrics.items():
            # a gradient whose parts cancel is exactly zero in one order of summation and 1e-11 in another
            tolerance = 2e-4 if key == "optim/zero_grad_ratio" else 1e-8
            # a divergence is the square of a small difference of log-probabilities
            relative = 1e-4 if "kl" in key else 1e-5
            if not key.startswith(("perf/", "time/")):
                assert metrics[key] == pytest.approx(value, rel=relative, abs=tolerance), key


@pytest.mark.parametrize("name", REFUSED)
def test_a_degree_that_does_not_fit_the_model_is_refused_with_the_numbers(results, name):
    assert REFUSED[name] in results.report(name)["refused"]


@pytest.mark.parametrize("names", [("half-deepep-2", "half-1")])
def test_deepep_dispatch_trains_as_one_rank_within_bfloat16_precision(results, names):
    found, expected = names
    assert_close(results.tensors(found), results.tensors(expected), 0.05)


@pytest.mark.parametrize("name", [slow_unless(name, "float16-lora-2") for name in FLOAT16])
def test_float16_with_a_scaled_loss_trains_as_one_rank(results, name):
    """The mixture's reference is float16 too: rounding changes the experts of single tokens.

    The dense model in bfloat16 differs by 0.03. Adapters differ most: their first weights B are zero.
    """
    assert_close(results.tensors(name), results.tensors(FLOAT16[name]["reference"]), 0.02)
    scales = [
        metrics["optim/loss_scale"] for metrics in results.report(name)["steps"][:STEPS]
    ]  # then an evaluation
    assert scales == [65536] * STEPS


@pytest.mark.parametrize("expected", [("fp8-1", "plain-1")])
@pytest.mark.parametrize("name", [slow_unless(name, "fp8-expert-2") for name in IN_FP8])
def test_layouts_in_fp8_train_as_one_rank_within_the_precision_of_fp8(results, name, expected):
    expected, plain, found = (results.tensors(case) for case in (*expected, name))
    deviation = relative_change(expected, plain)
    assert deviation > 0.01  # FP8 is coarser than bfloat16
    assert relative_change(found, expected) < 0.6 * deviation


def relative_change(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the norm of the change of all first gradients, relative to their norm."""
    names = [name for name in expected if name.startswith("gradient")]
    changes = torch.stack([(found[name] - expected[name]).norm() for name in names])
    return float(changes.norm() / torch.stack([expected[name].norm() for name in names]).norm())


def plain_loss(model, step: int) -> Tensor:
    """Mean cross-entropy of the supervised rows of ``step``, computed sample by sample."""
    total, count = torch.zeros(()), 0
    for row in batch(step, {"model": "of text", "is_supervised": True}):
        start, weights = 0, row.ce_weights
        assert weights is not None
        for length in row.sample_lengths.tolist():
            ids = torch.from_numpy(row.input_ids[start : start + length]).long()
            is_trained = torch.from_numpy(weights[start : start + length])[1:] != 0
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            logprobs = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
            total, count = total - logprobs[is_trained].sum(), count + int(is_trained.sum())
            start += length
    return total / count


@pytest.mark.parametrize("name", [f"{family}-1" for family in (*FAMILIES, "tied")])
def test_a_family_trains_as_plain_transformers_does(results, name):
    """Cross-entropy of unpacked samples, computed with transformers on one process."""
    from transformers import AutoModelForCausalLM

    family = name.removesuffix("-1")
    attention = "eager" if family == "gpt_oss" else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(results.folder / family, attn_implementation=attention)
    loss = plain_loss(model, 1)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert results.report(name)["steps"][0]["loss/mean"] == pytest.approx(loss.item(), rel=1e-5)
    tensors = results.tensors(name)
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        difference = (tensors[f"gradient.{key}"] - parameter.grad).norm()
        assert difference <= 1e-5 * parameter.grad.norm(), key


@pytest.mark.parametrize("name", in_gate(name for name in EXPORTED if name not in ADAPTERS))
def test_an_export_has_the_names_of_its_source_and_loads_in_transformers(results, name):
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    folder = RunDir(results.folder / f"{name}-run").weights_step(STEPS)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    source = load_file(results.folder / LAYOUTS[name]["model"] / "model.safetensors")
    towers = set(filter(is_tower_tensor, source))
    assert set(index) in (set(source), set(source) - towers)
    attention = "eager" if LAYOUTS[name]["model"] == "gpt_oss" else "sdpa"
    is_composite = LAYOUTS[name]["model"] in ("qwen3_vl", *COMPOSITES)
    kind = AutoModelForImageTextToText if is_composite else AutoModelForCausalLM
    model = kind.from_pretrained(folder, attn_implementation=attention)
    tensors = results.tensors(name)
    for key, value in model.state_dict().items():
        if key in model.all_tied_weights_keys or (is_tower_tensor(key) and not towers & set(index)):
            continue  # compared under the name of the other weight, or left out
        trained = tensors.get(f"weight.{key}")
        if trained is None and key not in source:
            continue  # a buffer with another name in files
        assert torch.equal(value, source[key] if trained is None else trained), key  # or a buffer


@pytest.mark.parametrize("name", ["lora-1", "lora-dense-1"])
def test_only_the_adapters_of_a_policy_are_trained(results, name):
    tensors = results.tensors(name)
    trained = {key.removeprefix("gradient.") for key in tensors if key.startswith("gradient.")}
    assert trained and all(key.endswith(("lora_A", "lora_B")) for key in trained)
    base = load_model(results.folder / {"lora-1": "qwen3_moe", "lora-dense-1": "qwen3"}[name])
    for key, value in base.named_parameters():
        assert torch.equal(tensors[f"weight.{key}"], value), key
    assert not any(
        torch.equal(tensors[f"weight.{key}"], torch.zeros_like(tensors[f"weight.{key}"])) for key in trained
    )


@pytest.mark.parametrize("names", [("lora-half-2", "lora-1")])
def test_frozen_weights_are_stored_in_the_type_of_the_computation(results, names):
    for key, value in results.tensors(names[0]).items():
        is_trained = key.endswith(("lora_A", "lora_B"))
        assert value.dtype == (torch.float32 if is_trained else torch.bfloat16), key
    losses, expected = (
        [step["loss/mean"] for step in results.report(name)["steps"][:STEPS]] for name in names
    )
    assert losses == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", in_gate(ADAPTERS))
def test_adapters_merged_into_their_base_are_the_trained_policy(results, name, tmp_path):
    """All weights are equal to 1e-6, and transformers computes the same log-probabilities."""
    base, adapter, lora = exported_adapter(results, name)
    merge_adapter(base, adapter, tmp_path, version=STEPS)
    verify_checksums(tmp_path)
    model, tensors = load_model(tmp_path), results.tensors(name)
    scale = lora.get("alpha", 32.0) / lora["rank"]
    for key, value in model.named_parameters():
        pair = [tensors.get(f"weight.{key.removesuffix('weight')}{side}") for side in ("lora_A", "lora_B")]
        if key.endswith("_proj"):  # fused experts
            pair = [tensors[f"weight.{key}_{side}"] for side in ("lora_A", "lora_B")]
        expected = tensors[f"weight.{key}"]
        if pair[0] is not None:
            expected = expected + scale * pair[1] @ pair[0]
        assert (value - expected).abs().max() <= 1e-6, key
    with torch.no_grad():
        loss = plain_loss(model, 9).item()
    assert results.report(name)["steps"][-1]["val/loss"] == pytest.approx(loss, rel=1e-5)


# PEFT gives fused experts a pattern of ranks, and then looks for it among modules alone
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("name", in_gate(ADAPTERS))
def test_peft_loads_an_adapter_as_the_trained_policy(results, name):
    peft = pytest.importorskip("peft")
    base, adapter, _ = exported_adapter(results, name)
    model = peft.PeftModel.from_pretrained(load_model(base), adapter)
    with torch.no_grad():
        loss = plain_loss(model, 9).item()
    assert results.report(name)["steps"][-1]["val/loss"] == pytest.approx(loss, rel=1e-5)


def exported_adapter(results: Results, name: str) -> tuple[Path, Path, dict[str, Any]]:
    """Return the base model, the adapter, and the LoRA settings of the recipe."""
    case = LAYOUTS[name]
    adapter = RunDir(results.folder / f"{name}-run").weights_step(STEPS)
    return results.folder / case["model"], adapter, case["lora"]


def load_model(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")


@pytest.mark.parametrize("name", ["shard-2", "expert-8", "auto-3"])
def test_no_rank_holds_more_of_a_tensor_than_its_own_part_while_loading(results, name):
    report = results.report(name)
    assert report["largest_loaded"] <= report["largest_own"]
    whole = max(value.numel() for value in results.tensors(name).values())
    assert report["largest_own"] < whole


@pytest.mark.parametrize(
    ("name", "gathers", "scatters"),
    [("small", 1 + 4 * 4, 3), ("large", 1 + 4 * 4, 4 * 3), ("kept", 1 + 4 * 2, 3), ("whole", 1, 1)],
)
def test_a_step_of_four_forwards_has_the_expected_collectives(results, name, gathers, scatters):
    """Two blocks are gathered again for the backward pass, and the rest once; a small model can be one group.

    Gradients of small models are reduced once.
    """
    counts = results.report(name)["collectives"]
    assert counts["_allgather_base_"] == gathers
    assert counts["_reduce_scatter_base_"] == scatters


@pytest.mark.parametrize(("name", "per_step"), [("small", [0, 1, 1]), ("large", [0, 0, 0])])
def test_all_ranks_collect_garbage_at_the_same_step_and_at_no_other(results, name, per_step):
    assert results.report(name)["collections"] == [per_step] * 2


@pytest.mark.parametrize("names", [("large-replicated", "large")])
def test_replicas_are_averaged_once_a_step(results, names):
    """Two forward passes. Of the five weight groups, two of experts are not sharded within a replica: no
    reduce-scatter."""
    counts = results.report(names[0])["collectives"]
    assert counts["_reduce_scatter_base_"] == 2 * 3
    totals_and_norm = results.report(names[1])["collectives"]["allreduce_"]
    # the experts' norm is summed over both axes of their mesh, and their loads over all ranks
    assert counts["allreduce_"] == totals_and_norm + 5 + 2 + 1


# -- the roles, wired to the recipe
# --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_experts(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), rows=60, hidden=32, experts=4)


def test_rl_with_context_and_expert_parallelism_equals_rl_on_one_rank(tiny_experts, tmp_path, forked_ranks):
    """Batches are split for data ranks: two ranks that share every row read the same file."""
    model = tiny_experts / "model"
    runs = []
    for ranks, layout in ((1, {}), (2, {"context_parallel": 2, "expert_parallel": 2})):
        recipe = rl_recipe(model, max_steps=2, layout={"trainer": layout}, checkpoint={"at_end": False})
        run = make_run(tmp_path / str(ranks), recipe, model, ranks=ranks)
        send(run, (1, 2), ranks=1)
        code, log = forked_ranks(run, "trainer-0")
        assert code == 0, log
        runs.append(run)
    np.testing.assert_allclose(curve(runs[1]), curve(runs[0]), rtol=1e-5, atol=1e-6)


def test_sft_with_ring_attention_equals_sft_on_one_rank(tiny_experts, tmp_path, forked_ranks):
    names = ("loss/mean", "optim/grad_norm", "progress/total_samples", "progress/num_tokens")
    runs = []
    for ranks, layout in ((1, {}), (2, {"context_parallel": 2, "context_style": "ring"})):
        recipe = sft_recipe(tiny_experts, max_steps=2, layout={"trainer": layout})
        recipe["sft"]["validation"]["interval"] = 2
        run = make_run(tmp_path / str(ranks), recipe, tiny_experts / "model", ranks=ranks, role=Role.SFT)
        code, log = forked_ranks(run, "sft-0")
        assert code == 0, log
        runs.append(run)
    np.testing.assert_allclose(curve(runs[1], "sft", *names), curve(runs[0], "sft", *names), rtol=1e-5)
    losses = [read_steps(run.metrics("sft"))[2]["val/loss"] for run in runs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
