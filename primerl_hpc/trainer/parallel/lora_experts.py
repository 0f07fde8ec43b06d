"""Grouped products of fused experts, in FP8 too, and their low-rank adapters: one pair per expert and matrix.

`forward_adapted_experts` computes the same as transformers' ``grouped_mm_experts_forward``, with the adapters' products
added before the gate and after the second matrix. With expert parallelism, `run_sorted` computes a rank's own experts,
with adapters or without.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear

from primerl_hpc.recipe.schema.training import LoRA
from primerl_hpc.trainer.fp8.products import format_of, grouped_multiply
from primerl_hpc.trainer.parallel.fused_experts import FusedExperts

SORTED_EXPERTS = "primerl_sorted_experts"


def adapt_experts(module: FusedExperts, config: LoRA) -> None:
    """Add a pair [E, rank, in], [E, out, rank] for each fused matrix."""
    for name in matrices_of(module):
        weight = getattr(module, name)
        num, *sizes = weight.shape
        size_in, size_out = sizes if module.is_transposed else reversed(sizes)
        a = weight.new_empty(num, config.rank, size_in, dtype=torch.float32)
        b = weight.new_empty(num, size_out, config.rank, dtype=torch.float32)
        module.register_parameter(f"{name}_lora_A", nn.Parameter(a))
        module.register_parameter(f"{name}_lora_B", nn.Parameter(b))
    module.lora_scale, module.lora_dropout = config.scale, config.dropout


def use_sorted_experts(hf: PreTrainedModel) -> None:
    """Let experts that are all on this rank compute by `forward_sorted_experts`."""
    ALL_EXPERTS_FUNCTIONS.register(SORTED_EXPERTS, forward_sorted_experts)
    hf.set_experts_implementation(SORTED_EXPERTS)


def matrices_of(experts: FusedExperts) -> tuple[str, str]:
    return ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")


def has_adapters(experts: FusedExperts) -> bool:
    return hasattr(experts, "down_proj_lora_A")


@dataclass
class Pairs:
    """S pairs of a token and an expert, in order of experts."""

    ids: Tensor  # [S] the expert of each pair
    ends: Tensor  # [E] int32, end of each expert's pairs
    is_absent: (
        Tensor | None
    )  # [S, 1] pairs of other ranks' experts: they are last, and kernels do not write them


def make_pairs(ids: Tensor, num_experts: int, *, has_absent: bool) -> Pairs:
    """``ids`` [S] ascending; ``num_experts``, beyond the last expert, belongs to an expert of another rank.

    ``has_absent`` False: there are none of these, so that nothing has to be masked.
    """
    ends = torch.searchsorted(ids, torch.arange(num_experts, device=ids.device), right=True).int()
    if not has_absent:
        return Pairs(ids, ends, None)
    return Pairs(ids.clamp(max=num_experts - 1), ends, (ids >= num_experts)[:, None])


def run_sorted(experts: FusedExperts, rows: Tensor, pairs: Pairs) -> Tensor:
    """Return the output of each pair's expert for its row, without the routing weight: [S, H] → [S, H]."""
    rows = masked(rows, pairs)
    first, second = matrices_of(experts)
    rows = multiply(experts, first, rows, pairs)
    rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
    return multiply(experts, second, rows, pairs)


def forward_adapted_experts(experts: FusedExperts, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute the experts' output: the function of the experts interface. [N, H], [N, k], [N, k] → [N, H].

    An index of E belongs to an expert of another rank and has weight 0.
    """
    return _forward_sorted(experts, hidden, index, weights, has_absent=True)


def forward_sorted_experts(experts: FusedExperts, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute the output of experts that are all on this rank, as `forward_adapted_experts`."""
    return _forward_sorted(experts, hidden, index, weights, has_absent=False)


def _forward_sorted(
    experts: FusedExperts, hidden: Tensor, index: Tensor, weights: Tensor, *, has_absent: bool
) -> Tensor:
    top_k = index.shape[-1]
    ids, order = index.reshape(-1).sort()
    pairs = make_pairs(ids, experts.num_experts, has_absent=has_absent)
    rows = run_sorted(experts, hidden[order // top_k], pairs) * weights.reshape(-1)[order][:, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return rows[back].view(-1, top_k, hidden.shape[-1]).sum(1).to(hidden.dtype)


def multiply(experts: FusedExperts, name: str, rows: Tensor, pairs: Pairs) -> Tensor:
    """Multiply rows [S, in] by each row's expert and, if there is one, its adapter: [S, out].

    FP8 needs rows that all belong to an expert; a rank that received none computes its one absent row as usual.
    """
    bias = getattr(experts, f"{name}_bias")[pairs.ids] if experts.has_bias else None
    weight, form = getattr(experts, name), format_of(experts)
    if form is None or pairs.is_absent is not None:
        out = _grouped_linear(rows, weight, pairs.ends, bias, experts.is_transposed)
    else:
        out = grouped_multiply(rows, weight.mT if experts.is_transposed else weight, pairs.ends, form)
        out = out if bias is None else out + bias
    if has_adapters(experts):
        low = F.dropout(rows, experts.lora_dropout, experts.training)
        low = masked(_grouped_linear(low, getattr(experts, f"{name}_lora_A"), pairs.ends), pairs)
        out = out + experts.lora_scale * _grouped_linear(low, getattr(experts, f"{name}_lora_B"), pairs.ends)
    return masked(out, pairs)


def masked(rows: Tensor, pairs: Pairs) -> Tensor:
    """Return the rows with zeros in place of those of absent pairs, which may be uninitialized."""
    return rows if pairs.is_absent is None else rows.masked_fill(pairs.is_absent, 0.0)
