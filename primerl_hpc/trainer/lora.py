"""Low-rank adapters: y = W x + (alpha / rank) · B A x, with W frozen (arXiv 2106.09685).

Adapters are parameters of the very modules they adapt (``q_proj.lora_A``, ``experts.gate_up_proj_lora_B``), so every name of
the base model stays what it is: its files load, and its blocks shard, spread and recompute, as without them. Fused
experts have one pair per expert and matrix, cut over ranks like the experts themselves.

    attach_adapters(hf, blocks, recipe.lora)              # on the meta device; freezes all else
    init_adapters(hf, seed)                               # once there is memory: A uniform, B zero
"""

from __future__ import annotations

import math
import zlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.training_schema import LoRA
from primerl_hpc.trainer.load import own_part
from primerl_hpc.trainer.lora_experts import adapt_experts, forward_adapted_experts
from primerl_hpc.trainer.parallel.expert import expert_modules
from primerl_hpc.trainer.parallel.mesh import local

ADAPTED_EXPERTS = "primerl_adapted_experts"
SUFFIXES = ("lora_A", "lora_B")
EXPERT_RANK_MULTIPLE = 8  # rows that grouped matrices read start at multiples of 16 bytes


def is_adapter(name: str) -> bool:
    return name.endswith(SUFFIXES)


class AdaptedLinear(nn.Linear):
    """A linear layer that became an adapted one by `adapt_linear`; its own weight and bias are as before."""

    lora_A: nn.Parameter  # [rank, in]
    lora_B: nn.Parameter  # [out, rank]
    lora_scale: float
    lora_dropout: float

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(F.dropout(x, self.lora_dropout, self.training), self.lora_A)
        return super().forward(x) + self.lora_scale * F.linear(low, self.lora_B)


def attach_adapters(hf: nn.Module, blocks: list[nn.Module], config: LoRA) -> None:
    """Adapt what ``config`` names in the decoder's blocks; all other parameters are frozen. Before sharding.

    Raises ConfigError for a name that nothing has, and for what cannot be adapted.
    """
    hf.requires_grad_(False)
    experts = set(expert_modules(hf))
    found = chosen_modules(hf, blocks, config, experts)
    for path, module in found.items():
        if module in experts:
            check_experts(hf, path, module, config)
            adapt_experts(module, config)
        else:
            adapt_linear(module, config)
    if experts & set(found.values()):
        ALL_EXPERTS_FUNCTIONS.register(ADAPTED_EXPERTS, forward_adapted_experts)
        hf.set_experts_implementation(ADAPTED_EXPERTS)


def chosen_modules(
    hf: nn.Module, blocks: list[nn.Module], config: LoRA, experts: set[nn.Module]
) -> dict[str, nn.Module]:
    """Path → module, in the model's order."""
    inside = {module for block in blocks for module in block.modules()}
    possible = {
        path: module
        for path, module in hf.named_modules()
        # gates of one output have no low rank to speak of
        if module in inside and (module in experts or (type(module) is nn.Linear and module.out_features > 1))
    }
    if config.target_modules == "auto":
        return possible
    chosen: dict[str, nn.Module] = {}
    for name in config.target_modules:
        matching = {path: module for path, module in possible.items() if f".{path}".endswith(f".{name}")}
        if not matching:
            known = sorted({path.rsplit(".", 1)[-1] for path in possible})
            raise ConfigError(
                f"lora.target_modules names {name}, which no block of {type(hf).__name__} has",
                mend=f"adapters can go to {', '.join(known)}",
            )
        chosen |= matching
    return {path: module for path, module in possible.items() if path in chosen}


def adapt_linear(module: nn.Module, config: LoRA) -> None:
    module.__class__ = AdaptedLinear
    like = module.weight
    module.lora_A = nn.Parameter(like.new_empty(config.rank, module.in_features, dtype=torch.float32))
    module.lora_B = nn.Parameter(like.new_empty(module.out_features, config.rank, dtype=torch.float32))
    module.lora_scale, module.lora_dropout = config.alpha / config.rank, config.dropout


def check_experts(hf: nn.Module, path: str, module: nn.Module, config: LoRA) -> None:
    """Raises ConfigError where the rank does not fit grouped matrices, or adapters could not be written.

    The adapter format knows experts one by one, as the model's files do in most families.
    """
    if config.rank % EXPERT_RANK_MULTIPLE:
        raise ConfigError(
            f"lora.rank {config.rank} is no multiple of {EXPERT_RANK_MULTIPLE}, which adapters of experts need"
        )
    name = f"{path}.down_proj"
    if not all(key.endswith(".weight") for key in revert_weight_conversion(hf, {name: module.down_proj})):
        raise ConfigError(
            f"files of {type(hf).__name__} hold all experts in one tensor, for which no adapter format serves",
            mend="name other modules in lora.target_modules, e.g. [q_proj, k_proj, v_proj, o_proj]",
        )


# -- memory and values -----------------------------------------------------------------------------------------------------


def shrink_frozen(hf: nn.Module, dtype: torch.dtype) -> None:
    """Frozen parameters need no float32 master: they are kept in the type that they are used in."""
    for parameter in hf.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def init_adapters(hf: nn.Module, seed: int) -> None:
    """B = 0 and A uniform in ±1/√in (kaiming with a = √5): the same numbers whatever the layout of ranks."""
    for name, parameter in hf.named_parameters():
        if not is_adapter(name):
            continue
        if name.endswith("lora_B"):
            local(parameter).zero_()
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        bound = 1 / math.sqrt(parameter.shape[-1])
        values = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        local(parameter).copy_(values[own_part(parameter)])
