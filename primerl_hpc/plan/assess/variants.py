"""Options of the trainer that trade memory for time: its mesh, recomputation and offloads.

    variant, number, misfits = fastest_variant(case, base, parts)      # of all that the recipe's values allow

They do not change the engines, so for each number of ranks the fastest one that fits is the best.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from primerl_hpc.common.model_families import family_of
from primerl_hpc.plan.assess.case import Case
from primerl_hpc.plan.assess.choice import LayoutChoice, trainer_experts
from primerl_hpc.plan.assess.parts import Parts
from primerl_hpc.plan.assess.prediction import trainer_fits
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.training import TOWER_KEYS

MAX_CONTEXT_PARALLEL = 16
OFFLOADS = (
    (False, False, False),
    (True, False, False),
    (False, True, False),
    (True, True, False),
    (False, False, True),
)
"""activation, optimizer, cpu: from the fastest to the one with the least memory."""

TENSOR_DEGREES = (2, 4, 8)
FEW_ROWS = 2
"""Tensor parallelism is tried if a batch has fewer rows than this for each rank. With more, every rank has rows of
its own, and collectives in every layer would only take time."""

VARIANT_FIELDS = (
    "replicate",
    "context_parallel",
    "trainer_tensor_parallel",
    "trainer_expert_parallel",
    "checkpointing",
    "checkpointing_every",
    "activation_offload",
    "optimizer_offload",
    "cpu_offload",
)


def fastest_variant(case: Case, base: LayoutChoice, parts: Parts) -> tuple[LayoutChoice, int, int]:
    """Return the fastest fitting variant of the trainer, the number of variants, and how many do not fit."""
    fitting: list[tuple[float, int, LayoutChoice]] = []
    number, variant = 0, base
    tensors = list(_tensor_degrees(case, base))
    first = tensors if _has_few_rows(case, base) else tensors[:1]
    for degrees in (first, tensors[len(first) :]):  # the others only if nothing fits
        for variant in trainer_variants(case, base, degrees) if not fitting else ():
            number += 1
            if trainer_fits(parts, variant):
                fitting.append((parts.trainer_step_s(variant), number, variant))
    if not fitting:
        return variant, max(number, 1), number
    return min(fitting, key=_speed)[2], number, number - len(fitting)


def _speed(item: tuple[float, int, LayoutChoice]) -> tuple[float, int]:
    return item[0], item[1]


def _has_few_rows(case: Case, base: LayoutChoice) -> bool:
    return case.batch_tokens / case.recipe.seq_len < FEW_ROWS * base.trainer_ranks


def _tensor_degrees(case: Case, base: LayoutChoice) -> Iterator[int]:
    """Yield the recipe's degree; with ``auto`` 1 and those that divide the heads, within a node."""
    layout, shape = case.recipe.layout.trainer, case.shape
    yield layout.tensor_degree
    has_tower = bool(shape.vision) or case.recipe.trainer.vision in TOWER_KEYS
    if layout.tensor_parallel != "auto" or not family_of(shape.family).may_be_divided or has_tower:
        return
    attentions = [layer.attention for layer, _ in shape.groups]
    for degree in TENSOR_DEGREES:
        if base.ranks_per_node % degree == 0 and all(
            attention is not None
            and attention.heads % degree == 0
            and (attention.kv_heads % degree == 0 or degree % attention.kv_heads == 0)
            for attention in attentions
        ):
            yield degree


def trainer_variants(
    case: Case, base: LayoutChoice, tensors: Iterable[int] | None = None
) -> Iterator[LayoutChoice]:
    """Yield the variants with these degrees of tensor parallelism; None: with that of ``base``."""
    for tensor in (base.trainer_tensor_parallel,) if tensors is None else tensors:
        yield from _variants_of(case, replace(base, trainer_tensor_parallel=tensor))


def _variants_of(case: Case, base: LayoutChoice) -> Iterator[LayoutChoice]:
    config = case.recipe.trainer
    policies: list[Any] = [config.activation_checkpointing]
    if config.activation_checkpointing == "auto":
        policies = ["none", "full"]
    for mesh in _meshes(case, base):
        for policy in policies:
            for activation, optimizer, cpu in _offloads(case.recipe, policy):
                yield replace(
                    mesh,
                    checkpointing=policy,
                    checkpointing_every=config.activation_checkpointing_every,
                    activation_offload=activation,
                    optimizer_offload=optimizer,
                    cpu_offload=cpu,
                )


def _meshes(case: Case, base: LayoutChoice) -> Iterator[LayoutChoice]:
    """Yield the trainer's degrees: replicas of complete nodes, and context parallelism within a node."""
    recipe, per_node = case.recipe, base.ranks_per_node
    context = recipe.layout.trainer.context_parallel
    degrees = [1, 2, 4, 8, MAX_CONTEXT_PARALLEL] if context == "auto" else [context]
    if context == "auto" and recipe.trainer.vision in TOWER_KEYS:
        degrees = [1]  # ranks cannot share rows with images
    most = max(1, min(per_node // base.trainer_tensor_parallel, MAX_CONTEXT_PARALLEL))
    for replicas in _replicas(recipe, base):
        if base.trainer_ranks % replicas:
            continue
        shard = base.trainer_ranks // replicas
        experts = trainer_experts(recipe, base.trainer_ranks, per_node, case.shape.num_experts, replicas)
        for degree in degrees:
            if shard % (degree * base.trainer_tensor_parallel) == 0 and (context != "auto" or degree <= most):
                yield replace(
                    base, replicate=replicas, context_parallel=degree, trainer_expert_parallel=experts
                )


def _replicas(recipe: Recipe, base: LayoutChoice) -> list[int]:
    replicas, nodes = recipe.layout.trainer.replicate, base.trainer_nodes
    if replicas != "auto":
        return [replicas]
    return [number for number in (2**power for power in range(8)) if nodes and nodes % number == 0]


def _offloads(recipe: Recipe, policy: Any) -> Iterator[tuple[bool, bool, bool]]:
    config = recipe.trainer
    wanted = (config.activation_offload, config.optimizer_offload, config.cpu_offload)
    for values in OFFLOADS:
        merged = tuple(
            value if choice == "auto" else choice is True
            for choice, value in zip(wanted, values, strict=True)
        )
        is_new = merged == values or "auto" not in wanted
        if is_new and not (merged[0] and policy != "full") and not (merged[1] and merged[2]):
            yield merged[0], merged[1], merged[2]
            if "auto" not in wanted:
                return
