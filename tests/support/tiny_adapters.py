"""Adapters with random values on random tiny models, written as the trainer writes them. Needs a process group of one
rank."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from primerl_hpc.recipe.schema.layout import TrainerLayout
from primerl_hpc.recipe.schema.training import LoRA
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer.model.families import decoder_blocks
from primerl_hpc.trainer.model.lora import attach_adapters, init_adapters
from primerl_hpc.trainer.model.policy import Policy
from primerl_hpc.trainer.parallel.context import Context
from primerl_hpc.trainer.parallel.mesh import make_world
from primerl_hpc.trainer.weights.filesystem import adapter_config, export_adapters
from tests.support.tiny_models import COMMON, EXPERTS, FAMILIES, GROUPS, MORE_FAMILIES

MLA = FAMILIES["deepseek_v3"]
SHAPES = {
    "qwen3": FAMILIES["qwen3"],
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 8},
    "qwen3_moe": {**FAMILIES["qwen3_moe"], "mlp_only_layers": [0]},  # a dense layer and a mixture
    "qwen2_moe": {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 24},
    "glm4_moe": FAMILIES["glm4_moe"],
    "glm4_moe_lite": MLA,
    "deepseek_v2": {**MLA, "topk_method": "greedy"},
    "deepseek_v3": MLA,
    "dots1": {**EXPERTS, **GROUPS},
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1},
    "hunyuan_v1_moe": {**EXPERTS, "num_experts": 8, "moe_topk": 2, "head_dim": 8},
    "phimoe": {"num_experts_per_tok": 2, "num_local_experts": 8},
    "granitemoe": {"num_experts_per_tok": 2, "num_local_experts": 8},
}


def make_base(family: str, folder: Path):
    """A model with noise on every parameter, and its folder."""
    torch.manual_seed(0)
    shape = SHAPES.get(family) or (FAMILIES | MORE_FAMILIES)[family]
    config = AutoConfig.for_model(family, **COMMON | shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return load(folder)


def load(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def export_random_adapter(hf, base: Path, run: RunDir, lora: LoRA, *, seed: int = 0) -> Path:
    """Attach adapters to ``hf`` that change its output, and export them as the trainer does."""
    attach_adapters(hf, decoder_blocks(hf), lora)
    init_adapters(hf, seed=seed)
    policy = Policy(hf, chunk_tokens=64, attention="sdpa", context=Context())
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, value in policy.adapters():
            if name.endswith("lora_B"):
                value.copy_(torch.randn_like(value) * 0.1)
    world = make_world(TrainerLayout(), torch.device("cpu"), local_rank=0, local_size=1)
    config = adapter_config(lora, str(base))
    export_adapters(run, policy, 1, config=config, dtype="float32", world=world)
    return run.weights_step(1)
