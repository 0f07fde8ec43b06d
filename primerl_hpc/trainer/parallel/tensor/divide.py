"""Divides the matrices of a model among the ranks of ``tensor`` by its plan, before FSDP.

    plan = DivisionPlan(families.tensor_plan(config), families.fused_sizes)
    ranks = divide_model(hf, blocks, world.tensor_mesh["tensor"], plan)       # on the meta device

Heads are divided as complete heads. If there are fewer key-value heads than ranks, several ranks compute the same one.
Fused projections (gate and up, or query, key and value in one matrix) are not stored divided, because their rows would
have to be reordered: a rank uses its rows of each projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedConfig, PreTrainedModel

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.trainer.parallel.tensor.layers import (
    ColumnLinear,
    DividedEmbedding,
    DividedLinear,
    Division,
    RowLinear,
    divided_embedding_class,
    gather_input,
)
from primerl_hpc.trainer.parallel.tensor.tokens import TensorGroup

KEY = "layout.trainer.tensor_parallel"
COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads")
"""Attributes of attention modules, and keys of their configuration, that count heads."""


@dataclass(frozen=True)
class DivisionPlan:
    """How the linear layers of a family's blocks are divided."""

    styles: Mapping[str, str]
    """Path in a block → ``columns``, ``rows``, or ``fused`` (columns of several projections)."""
    fused_sizes: Callable[[nn.Module, str, int], tuple[int, ...]]
    """Returns the rows of each projection of a fused layer, from its parent, name and rows; empty if not known."""


def divide_model(
    hf: PreTrainedModel, blocks: Sequence[nn.Module], mesh: DeviceMesh, plan: DivisionPlan
) -> TensorGroup:
    """Divide attention, MLPs, embeddings and head. ``mesh``: ("tensor",). Raises ConfigError if the model cannot be."""
    ranks = TensorGroup(mesh.get_local_rank(), mesh.size(), mesh.get_group())
    config = hf.config.get_text_config()
    check_heads(config, ranks.size)
    for block in blocks:
        linears = {
            path: module
            for path, module in block.named_modules()
            if path in plan.styles and isinstance(module, nn.Linear)
        }
        parents = {parent_of(path) for path in linears if plan.styles[path] == "rows"}
        if not any(is_attention(parent) for parent in parents):
            raise ConfigError(
                f"{KEY} is {ranks.size}, but this version cannot divide the attention of {type(hf).__name__}",
                hint="set it to 1 and use context_parallel instead",
            )
        for path, linear in linears.items():
            if parent_of(path) in parents:
                divide_linear(block, path, linear, plan, mesh, (ranks, config))
        for parent in sorted(parents):
            module = block.get_submodule(parent)
            module.register_forward_pre_hook(partial(gather_input, ranks), with_kwargs=True)
            if is_attention(parent):
                count_own_heads(module, ranks.size)
    divide_vocabulary(hf, mesh, ranks)
    return ranks


def check_heads(config: PreTrainedConfig, size: int) -> None:
    """Raise ConfigError if heads cannot be divided among ``size`` ranks."""
    heads, kv_heads = head_counts(config)

    def fits(degree: int) -> bool:
        return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)

    if not fits(size):
        nearest = min(filter(fits, range(1, heads + 1)), key=lambda degree: abs(degree - size))
        raise ConfigError(
            f"{KEY} {size} does not divide the model's {heads} attention heads and {kv_heads} key-value heads",
            hint=f"the nearest possible value is {nearest}",
        )


def head_counts(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the heads of queries, and those of keys and values."""
    heads = config.num_attention_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads


def parent_of(path: str) -> str:
    return path.rpartition(".")[0]


def is_attention(parent: str) -> bool:
    return "attn" in parent or "attention" in parent


def divide_linear(
    block: nn.Module,
    path: str,
    linear: nn.Linear,
    plan: DivisionPlan,
    mesh: DeviceMesh,
    model: tuple[TensorGroup, PreTrainedConfig],
) -> None:
    """Divide the linear layer of ``block`` at ``path``."""
    (ranks, config), style = model, plan.styles[path]
    parent, name = block.get_submodule(parent_of(path)), path.rpartition(".")[2]
    if style == "rows":
        ranges = (ranks.part_of(linear.in_features),)
        store_divided([linear], 1, mesh)
        become(linear, RowLinear, Division(ranks, ranges))
        return
    sizes = (
        plan.fused_sizes(parent, name, linear.out_features) if style == "fused" else (linear.out_features,)
    )
    if not sizes:
        raise ConfigError(
            f"{KEY} is {ranks.size}, but the projections in {path} are not known", hint="set it to 1"
        )
    heads, kv_heads = head_counts(config) if is_attention(path) else (0, 0)
    is_keys = name in ("k_proj", "v_proj")
    counts = [heads, kv_heads, kv_heads] if len(sizes) == 3 else [kv_heads if is_keys else heads] * len(sizes)
    ranges, start = [], 0
    for size, count in zip(sizes, counts, strict=True):
        part = part_of_heads(size, count, ranks)
        ranges.append(slice(start + part.start, start + part.stop))
        start += size
    if len(sizes) == 1 and not 0 < counts[0] < ranks.size:
        store_divided([linear], 0, mesh)
    become(linear, ColumnLinear, Division(ranks, tuple(ranges)))


def part_of_heads(size: int, heads: int, ranks: TensorGroup) -> slice:
    """Return this rank's rows of ``size`` rows of a projection. ``heads``: 0 for an MLP."""
    if not 0 < heads < ranks.size:
        return ranks.part_of(size)
    width, head = size // heads, ranks.rank * heads // ranks.size
    return slice(head * width, (head + 1) * width)


def become(linear: nn.Linear, kind: type[DividedLinear], division: Division) -> None:
    linear.__class__ = kind
    assert isinstance(linear, DividedLinear)  # for type checkers, which do not follow the assignment
    linear.division = division


def store_divided(modules: Sequence[nn.Module], dim: int, mesh: DeviceMesh) -> None:
    """Shard the weight that all ``modules`` share over ``mesh``."""
    weight = modules[0].weight
    assert isinstance(weight, nn.Parameter)
    sharded = distribute_tensor(weight.data, mesh, [Shard(dim)], src_data_rank=None)
    parameter = nn.Parameter(sharded, requires_grad=weight.requires_grad)
    for module in modules:
        module.weight = parameter


def count_own_heads(attention: nn.Module, size: int) -> None:
    """Set the counts of heads that the module's own code reads to those of one rank."""
    holders: list[Any] = [attention]
    if hasattr(attention, "qkv_proj"):  # its code splits the output by the configuration
        attention.undivided_config, attention.config = attention.config, copy(attention.config)
        holders.append(attention.config)
    for holder in holders:
        for name in COUNTS:
            if isinstance(count := getattr(holder, name, None), int):
                setattr(holder, name, max(1, count // size))


def divide_vocabulary(hf: PreTrainedModel, mesh: DeviceMesh, ranks: TensorGroup) -> None:
    """Divide the rows of embedding table and head, which may be one weight."""
    table, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    assert isinstance(table, nn.Embedding) and head is not None
    if head.weight is table.weight:
        store_divided([table, head], 0, mesh)
    else:
        store_divided([table], 0, mesh)
        store_divided([head], 0, mesh)
    table.__class__ = divided_embedding_class(type(table))
    assert isinstance(table, DividedEmbedding)
    table.division = Division(ranks, (ranks.part_of(table.num_embeddings),))
