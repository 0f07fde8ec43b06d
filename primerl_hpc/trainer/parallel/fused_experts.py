"""The attributes of fused experts: what transformers' experts interface has, and what the trainer sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

from torch import Tensor, nn
from transformers import PreTrainedConfig

from primerl_hpc.trainer.parallel.dispatch import ExpertDispatcher


class FusedExperts(nn.Module):
    """Declarations only. The modules are of the families' own classes, which transformers decorates with these
    attributes; none of them derives from this class.
    """

    config: PreTrainedConfig
    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool  # matrices are [E, in, out] instead of [E, out, in]
    is_concatenated: bool  # gate and up follow each other, instead of alternating
    gate_up_proj: nn.Parameter  # with a gate; otherwise up_proj
    down_proj: nn.Parameter
    act_fn: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]

    dispatcher: ExpertDispatcher
    """Set by `expert.distribute_experts`."""
    start_shared: Callable[[], None]
    """Starts the block's shared experts; set by `expert.overlap_shared_experts`."""
    lora_scale: float
    lora_dropout: float
    """Both set by `lora_experts.adapt_experts`."""


def has_fused_experts(module: nn.Module) -> TypeGuard[FusedExperts]:
    """True if the module is one of fused experts: it has the attributes that every such module has."""
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "num_experts", "down_proj"))
