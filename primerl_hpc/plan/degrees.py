"""Resolve and check the trainer's degrees of parallelism. Checks that need the model are done when it is loaded."""

from __future__ import annotations

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.schema.layout import TrainerLayout
from primerl_hpc.recipe.schema.recipe import Recipe

TOKENS_PER_RANK = 32_768
"""Maximum tokens of a row per rank with ``context_parallel: auto``."""


def check_even_ranks(ranks: int, nodes: int, per_node: int) -> None:
    """Raise ConfigError if ``nodes`` of ``per_node`` accelerators cannot run the same number of ranks each."""
    if ranks % nodes or ranks // nodes > per_node:
        raise ConfigError(
            f"layout.trainer.ranks {ranks} on {nodes} nodes of {per_node} accelerators: "
            "every node must run the same number of ranks"
        )


def resolve_degrees(recipe: Recipe, *, ranks: int, ranks_per_node: int) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe with the trainer's degrees except that of experts as numbers, and notes about them.

    Raises ConfigError for degrees that do not divide ``ranks``.
    """
    layout = recipe.layout.trainer
    notes: list[str] = []
    if layout.context_parallel == "auto":
        context = _auto_context(layout, recipe.seq_len, ranks, ranks_per_node)
        if context > 1:
            share = -(-recipe.seq_len // context)
            notes.append(
                f"layout.trainer.context_parallel: {context}, so that a rank has {share:,} of the "
                f"{recipe.seq_len:,} tokens of a row"
            )
        layout = layout.model_copy(update={"context_parallel": context})
    layout = layout.model_copy(
        update={"replicate": layout.num_replicas, "tensor_parallel": layout.tensor_degree}
    )
    check_degrees(layout, ranks)
    assert isinstance(layout.context_parallel, int)
    tensor = layout.tensor_degree
    if layout.num_replicas * layout.context_parallel * tensor > 1:
        data = ranks // layout.num_replicas // layout.context_parallel // tensor
        notes.append(
            f"trainer mesh: replicate {layout.num_replicas} × data {data} × context {layout.context_parallel} "
            f"{f'× tensor {tensor} ' if tensor > 1 else ''}= {ranks} ranks"
        )
    if tensor > 1 and ranks_per_node % tensor:
        notes.append(
            f"warning: layout.trainer.tensor_parallel {tensor} does not divide the {ranks_per_node} trainer ranks of a "
            "node, so the ranks that divide a matrix communicate over the network in every layer; "
            f"{largest_within(ranks_per_node, tensor)} would stay inside a node"
        )
    return recipe.model_copy(update={"layout": recipe.layout.model_copy(update={"trainer": layout})}), tuple(
        notes
    )


def _auto_context(layout: TrainerLayout, seq_len: int, ranks: int, ranks_per_node: int) -> int:
    """Return the smallest degree within a node with which a rank's share fits, or the largest possible degree."""
    groups = ranks // layout.num_replicas // layout.tensor_degree
    if ranks % (layout.num_replicas * layout.tensor_degree):
        return 1  # `check_degrees` raises
    most = max(1, min(groups, ranks_per_node // layout.tensor_degree))
    possible = [degree for degree in range(1, most + 1) if groups % degree == 0]
    enough = [degree for degree in possible if seq_len <= degree * TOKENS_PER_RANK]
    return enough[0] if enough else possible[-1]


def largest_within(size: int, most: int) -> int:
    """Return the largest divisor of ``size`` up to ``most``."""
    return max(degree for degree in range(1, min(size, most) + 1) if size % degree == 0)


def nearest_divisor(size: int, wanted: int) -> int:
    """Return the divisor of ``size`` next to ``wanted``."""
    divisors = [degree for degree in range(1, size + 1) if size % degree == 0]
    return min(divisors, key=lambda degree: abs(degree - wanted))


def check_degrees(layout: TrainerLayout, ranks: int) -> None:
    """Raise ConfigError for degrees that do not divide ``ranks``; ``auto`` counts as 1."""
    context = 1 if layout.context_parallel == "auto" else layout.context_parallel
    tensor = layout.tensor_degree
    degree = layout.num_replicas * context * tensor
    if ranks % degree:
        product = f"replicate {layout.num_replicas} × context_parallel {context}"
        if tensor > 1:
            product += f" × tensor_parallel {tensor}"
        others = layout.num_replicas * context
        is_tensor = tensor > 1 and ranks % others == 0
        raise ConfigError(
            f"layout.trainer: {product} = {degree} does not divide the trainer's {ranks} ranks",
            hint=f"the nearest possible tensor_parallel is {nearest_divisor(ranks // others, tensor)}"
            if is_tensor
            else "",
        )
    shard = ranks // layout.num_replicas
    if layout.expert_parallel != "auto" and shard % layout.expert_parallel:
        raise ConfigError(
            f"layout.trainer.expert_parallel {layout.expert_parallel} does not divide the {shard} ranks that share a "
            f"copy of the model ({ranks} ranks / replicate {layout.num_replicas})"
        )
