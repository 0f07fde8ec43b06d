"""Low-rank adapters: y = W x + (alpha / rank) · B A x, with W frozen (arXiv 2106.09685); `LoRA.scale` has the factor.

Adapters are parameters of the modules they adapt (``q_proj.lora_A``, ``experts.gate_up_proj_lora_B``), so every name of
the base model stays the same: files are loaded and blocks are sharded and recomputed as without adapters. Fused experts
have one pair per expert and matrix, sharded over ranks like the experts themselves.

    attach_adapters(hf, blocks, recipe.lora)              # on the meta device; freezes all others
    init_adapters(hf, seed)                               # once memory is allocated: A uniform, B zero
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence, Set

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.schema.training import ABSORBED, LoRA, is_target
from primerl_hpc.trainer.model.families import has_separate_experts
from primerl_hpc.trainer.parallel.expert import expert_modules
from primerl_hpc.trainer.parallel.fused_experts import FusedExperts, has_fused_experts
from primerl_hpc.trainer.parallel.lora_experts import adapt_experts, forward_adapted_experts
from primerl_hpc.trainer.parallel.mesh import local_slice, to_local

ADAPTED_EXPERTS = "primerl_adapted_experts"
SUFFIXES = ("lora_A", "lora_B")
EXPERT_RANK_MULTIPLE = 8  # grouped matrix products need rows that start at multiples of 16 bytes


def is_adapter(name: str) -> bool:
    return name.endswith(SUFFIXES)


class AdaptedLinear(nn.Linear):
    """A linear layer turned into an adapted one by `adapt_linear`; its own weight and bias are unchanged."""

    lora_A: nn.Parameter  # [rank, in]
    lora_B: nn.Parameter  # [out, rank]
    lora_scale: float
    lora_dropout: float

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(F.dropout(x, self.lora_dropout, self.training), self.lora_A)
        return super().forward(x) + self.lora_scale * F.linear(low, self.lora_B)


def attach_adapters(
    hf: PreTrainedModel, blocks: Sequence[nn.Module], config: LoRA, *, has_joined_experts: bool = False
) -> None:
    """Adapt the modules of the decoder's blocks that ``config`` names and freeze all others. Call before sharding.

    ``has_joined_experts``: the model's files hold the experts of a layer in one tensor. Raises ConfigError for a name
    that matches no module, and for a module that cannot be adapted.
    """
    hf.requires_grad_(False)
    experts = set(expert_modules(hf))
    found = select_modules(hf, blocks, config, experts)
    for path, module in found.items():
        if has_fused_experts(module):
            check_experts(hf, path, module, config, is_joined=has_joined_experts)
            adapt_experts(module, config)
        elif isinstance(module, nn.Linear):
            adapt_linear(module, config)
    if experts & set(found.values()):
        ALL_EXPERTS_FUNCTIONS.register(ADAPTED_EXPERTS, forward_adapted_experts)
        hf.set_experts_implementation(ADAPTED_EXPERTS)


def select_modules(
    hf: PreTrainedModel, blocks: Sequence[nn.Module], config: LoRA, experts: Set[nn.Module]
) -> dict[str, nn.Module]:
    """Return the modules to adapt by path, in the model's order.

    ``auto`` excludes `ABSORBED`: vLLM multiplies it into other matrices when it loads the model, so an adapter would
    train a policy that no engine samples from.
    """
    inside = {module for block in blocks for module in block.modules()}
    possible = {
        path: module
        for path, module in hf.named_modules()
        # a gate with one output cannot have a low rank
        if module in inside and (module in experts or (type(module) is nn.Linear and module.out_features > 1))
    }
    if config.target_modules == "auto":
        return {path: module for path, module in possible.items() if not path.endswith(f".{ABSORBED}")}
    chosen: dict[str, nn.Module] = {}
    for name in config.target_modules:
        matching = {path: module for path, module in possible.items() if is_target(path, name)}
        if not matching:
            known = sorted({path.rsplit(".", 1)[-1] for path in possible})
            raise ConfigError(
                f"lora.target_modules names {name}, which no block of {type(hf).__name__} has",
                hint=f"adapters can go to {', '.join(known)}",
            )
        chosen |= matching
    return {path: module for path, module in possible.items() if path in chosen}


def adapt_linear(module: nn.Linear, config: LoRA) -> None:
    like = module.weight
    module.__class__ = AdaptedLinear
    assert isinstance(module, AdaptedLinear)  # for type checkers, which do not follow the assignment
    module.lora_A = nn.Parameter(like.new_empty(config.rank, module.in_features, dtype=torch.float32))
    module.lora_B = nn.Parameter(like.new_empty(module.out_features, config.rank, dtype=torch.float32))
    module.lora_scale, module.lora_dropout = config.scale, config.dropout


def check_experts(
    hf: PreTrainedModel, path: str, module: FusedExperts, config: LoRA, *, is_joined: bool
) -> None:
    """Raise ConfigError if the rank does not suit grouped products, or the adapters could not be written.

    The adapter format stores experts one by one, as the model's files do in most families.
    """
    if config.rank % EXPERT_RANK_MULTIPLE:
        raise ConfigError(
            f"lora.rank {config.rank} must be a multiple of {EXPERT_RANK_MULTIPLE} for adapters of experts"
        )
    if is_joined or not has_separate_experts(hf, path, module):
        raise ConfigError(
            f"files of {type(hf).__name__} hold all experts in one tensor, which no adapter format supports",
            hint="name other modules in lora.target_modules, e.g. [q_proj, k_proj, v_proj, o_proj]",
        )


# -- memory and values -----------------------------------------------------------------------------


def cast_frozen_params(hf: PreTrainedModel, dtype: torch.dtype, kept: Sequence[nn.Module] = ()) -> None:
    """Cast frozen parameters to the type of forward and backward: they need no float32 master weights.

    ``kept``: modules that compute in float32 (`precision.float32_modules`).
    """
    in_float32 = {parameter for module in kept for parameter in module.parameters()}
    for parameter in hf.parameters():
        if not parameter.requires_grad and parameter not in in_float32:
            parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def init_adapters(hf: PreTrainedModel, seed: int) -> None:
    """Set B = 0 and A uniform in ±1/√in (kaiming with a = √5): the same numbers for every layout of ranks."""
    for name, parameter in hf.named_parameters():
        if not is_adapter(name):
            continue
        if name.endswith("lora_B"):
            to_local(parameter).zero_()
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        bound = 1 / math.sqrt(parameter.shape[-1])
        values = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        to_local(parameter).copy_(values[local_slice(parameter)])
