"""Low-rank adapters of fused experts: one pair per expert and matrix, multiplied group by pairs.

`forward_adapted_experts` does what transformers' ``grouped_mm_experts_forward`` does, with the adapters' products added
before the gate and after the second matrix. On a rank of expert parallelism it runs on the experts that live there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import _grouped_linear

from primerl_hpc.recipe.training_schema import LoRA


def adapt_experts(module: nn.Module, config: LoRA) -> None:
    """Pairs [E, rank, in] and [E, out, rank] beside each fused matrix."""
    for name in matrices_of(module):
        weight = getattr(module, name)
        num, *sizes = weight.shape
        size_in, size_out = sizes if module.is_transposed else reversed(sizes)
        a = weight.new_empty(num, config.rank, size_in, dtype=torch.float32)
        b = weight.new_empty(num, size_out, config.rank, dtype=torch.float32)
        module.register_parameter(f"{name}_lora_A", nn.Parameter(a))
        module.register_parameter(f"{name}_lora_B", nn.Parameter(b))
    module.lora_scale, module.lora_dropout = config.alpha / config.rank, config.dropout


def matrices_of(experts: nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")


def has_adapters(experts: nn.Module) -> bool:
    return hasattr(experts, "down_proj_lora_A")


@dataclass
class Pairs:
    """Tokens and their experts, in order of experts."""

    ids: Tensor  # [S] each pair's expert
    ends: Tensor  # [E] int32, where each expert's pairs end
    is_absent: (
        Tensor  # [S, 1] pairs of other ranks' experts: they come last, and kernels leave them unwritten
    )


def forward_adapted_experts(experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The experts interface's function. [N, H], [N, k], [N, k] → [N, H]; index E: no expert of ours, weight 0."""
    top_k = index.shape[-1]
    ids, order = index.reshape(-1).sort()
    ends = torch.searchsorted(ids, torch.arange(experts.num_experts, device=ids.device), right=True)
    pairs = Pairs(ids.clamp(max=experts.num_experts - 1), ends.int(), (ids >= experts.num_experts)[:, None])
    rows = hidden[order // top_k].masked_fill(pairs.is_absent, 0.0)
    first, second = matrices_of(experts)
    rows = adapted_matrix(experts, first, rows, pairs)
    rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
    rows = adapted_matrix(experts, second, rows, pairs) * weights.reshape(-1)[order][:, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return rows[back].view(-1, top_k, hidden.shape[-1]).sum(1).to(hidden.dtype)


def adapted_matrix(experts: nn.Module, name: str, rows: Tensor, pairs: Pairs) -> Tensor:
    """rows [S, in] → [S, out] by each row's own expert and its adapter."""
    bias = getattr(experts, f"{name}_bias")[pairs.ids] if experts.has_bias else None
    out = _grouped_linear(rows, getattr(experts, name), pairs.ends, bias, experts.is_transposed)
    low = F.dropout(rows, experts.lora_dropout, experts.training)
    low = _grouped_linear(low, getattr(experts, f"{name}_lora_A"), pairs.ends)
    low = low.masked_fill(pairs.is_absent, 0.0)
    out = out + experts.lora_scale * _grouped_linear(low, getattr(experts, f"{name}_lora_B"), pairs.ends)
    return out.masked_fill(pairs.is_absent, 0.0)
