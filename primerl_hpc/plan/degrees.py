"""The trainer's degrees: what divides what, and what ``auto`` comes to. What only the model can say is checked as it starts."""

from __future__ import annotations

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.layout_schema import TrainerLayout
from primerl_hpc.recipe.schema import Recipe

TOKENS_PER_RANK = 32_768
"""``context_parallel: auto`` leaves a rank at most so many tokens of a row."""


def settle_degrees(recipe: Recipe, *, ranks: int, ranks_per_node: int) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with ``layout.trainer.context_parallel`` as a number, and notes that say why.

    Raises ConfigError, with the numbers, for degrees that do not divide ``ranks``.
    """
    layout = recipe.layout.trainer
    notes: list[str] = []
    if layout.context_parallel == "auto":
        context = _auto_context(layout, recipe.seq_len, ranks, ranks_per_node)
        if context > 1:
            share = -(-recipe.seq_len // context)
            notes.append(
                f"layout.trainer.context_parallel: {context}, which leaves a rank {share:,} of a row's "
                f"{recipe.seq_len:,} tokens"
            )
        layout = layout.model_copy(update={"context_parallel": context})
    check_degrees(layout, ranks)
    assert isinstance(layout.context_parallel, int)
    if layout.replicate * layout.context_parallel > 1:
        data = ranks // layout.replicate // layout.context_parallel
        notes.append(
            f"trainer mesh: replicate {layout.replicate} × data {data} × context {layout.context_parallel} "
            f"= {ranks} ranks"
        )
    return recipe.model_copy(update={"layout": recipe.layout.model_copy(update={"trainer": layout})}), tuple(
        notes
    )


def _auto_context(layout: TrainerLayout, seq_len: int, ranks: int, ranks_per_node: int) -> int:
    """The least degree within a node with which a rank's share fits; else the largest there is."""
    if ranks % layout.replicate:
        return 1  # refused for that
    most = min(ranks // layout.replicate, ranks_per_node)
    possible = [degree for degree in range(1, most + 1) if ranks // layout.replicate % degree == 0]
    enough = [degree for degree in possible if seq_len <= degree * TOKENS_PER_RANK]
    return enough[0] if enough else possible[-1]


def check_degrees(layout: TrainerLayout, ranks: int) -> None:
    """``layout.context_parallel`` is a number here, or counts as 1."""
    context = 1 if layout.context_parallel == "auto" else layout.context_parallel
    degree = layout.replicate * context
    if ranks % degree:
        raise ConfigError(
            f"layout.trainer: replicate {layout.replicate} × context_parallel {context} = {degree} does not divide "
            f"the trainer's {ranks} ranks"
        )
    shard = ranks // layout.replicate
    if layout.expert_parallel != "auto" and shard % layout.expert_parallel:
        raise ConfigError(
            f"layout.trainer.expert_parallel {layout.expert_parallel} does not divide the {shard} ranks that share one "
            f"copy of the model ({ranks} ranks / replicate {layout.replicate})"
        )
