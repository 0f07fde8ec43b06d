"""The smallest change of a recipe with which a layout fits: few keys, from the least to the most intrusive.

change = smallest_change(case, prediction, space, parts)
str(change)                       # "set layout.inference.tensor_parallel to 2"
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from primerl_hpc.plan.assess.case import Case
from primerl_hpc.plan.assess.choice import LayoutChoice, PrefillChoice, trainer_experts
from primerl_hpc.plan.assess.parts import Parts
from primerl_hpc.plan.assess.prediction import ENGINES, PREFILL, TRAINER, Prediction, predict
from primerl_hpc.plan.assess.search import Space
from primerl_hpc.recipe.schema.recipe import Recipe

DOUBLINGS = (2, 4, 8, 16)
_KEYS = {
    "tensor_parallel": "layout.inference.tensor_parallel",
    "checkpointing": "trainer.activation_checkpointing",
    "checkpointing_every": "trainer.activation_checkpointing_every",
    "activation_offload": "trainer.activation_offload",
    "optimizer_offload": "trainer.optimizer_offload",
    "cpu_offload": "trainer.cpu_offload",
    "context_parallel": "layout.trainer.context_parallel",
    "replicate": "layout.trainer.replicate",
}
"""Key of the recipe by field of `LayoutChoice`."""


@dataclass(frozen=True)
class Change:
    """Keys and their new values, and the layout that they give."""

    values: tuple[tuple[str, str], ...]
    choice: LayoutChoice

    def __str__(self) -> str:
        return "set " + " and ".join(f"{key} to {value}" for key, value in self.values)


def smallest_change(
    case: Case, prediction: Prediction, space: Space, parts: Parts | None = None
) -> Change | None:
    """Return the first change, from the least to the most intrusive, with which everything fits; None if none does."""
    parts, before = parts or Parts(case), prediction.choice
    roles = {misfit.role for misfit in prediction.misfits}
    for engines in _all_engine_changes(case, before, space, roles):
        for choice in _trainer_changes(case, engines, space) if TRAINER in roles else [engines]:
            if predict(case, choice, parts=parts, depth="closed_form").fits:
                return Change(tuple(_values(case.recipe, before, choice)), choice)
    if TRAINER not in roles or case.recipe.checkpoint.copied_state == "none":
        return None
    # a save in the background needs a copy of the state in host memory, in addition to what is offloaded
    checkpoint = case.recipe.checkpoint.model_copy(update={"asynchronous": False})
    waiting = replace(case, recipe=case.recipe.model_copy(update={"checkpoint": checkpoint}))
    change = smallest_change(waiting, prediction, space)
    return change and replace(change, values=(*change.values, ("checkpoint.asynchronous", "false")))


def _all_engine_changes(
    case: Case, choice: LayoutChoice, space: Space, roles: set[str]
) -> Iterator[LayoutChoice]:
    """Yield changes of the kinds of engines that do not fit. A broadcast needs engines of equal size: both change."""
    if not roles & {ENGINES, PREFILL}:
        yield choice
        return
    is_broadcast = case.recipe.weights.transport == "broadcast"
    decoding = list(_engine_changes(case, choice, space)) if ENGINES in roles else [choice]
    if choice.prefill is None or (PREFILL not in roles and not is_broadcast):
        yield from decoding
        return
    if is_broadcast and ENGINES not in roles:
        decoding = list(_engine_changes(case, choice, space))
    prefill = list(_prefill_changes(choice.prefill, space))
    for engines in decoding:
        for other in prefill:
            low, high = sorted((engines.tensor_parallel, other.tensor_parallel))
            if not high % low and (not is_broadcast or engines.engine_gpus == other.engine_gpus):
                yield replace(engines, prefill=other)


def _prefill_changes(prefill: PrefillChoice, space: Space) -> Iterator[PrefillChoice]:
    """Yield larger prefill engines on the same GPUs."""
    gpus = prefill.num_engines * prefill.engine_gpus
    for factor in DOUBLINGS:
        size = prefill.engine_gpus * factor
        if size > space.gpus_per_node and size % space.gpus_per_node:
            continue
        if number := gpus // size:
            tensor = prefill.tensor_parallel * factor
            yield replace(prefill, tensor_parallel=tensor, num_engines=number)


def _values(recipe: Recipe, before: LayoutChoice, after: LayoutChoice) -> Iterator[tuple[str, str]]:
    """Yield the keys to set, with their values, so that the recipe of ``before`` has the layout ``after``."""
    inference, trainer = recipe.layout.inference, recipe.layout.trainer
    for field, key in _KEYS.items():
        if (value := getattr(after, field)) != getattr(before, field):
            yield key, str(value).lower()
    yield from _prefill_values(recipe, before.prefill, after.prefill)
    if after.num_engines != before.num_engines and inference.replicas != "auto":
        yield "layout.inference.replicas", str(after.num_engines)
    if after.trainer_nodes != before.trainer_nodes:
        if trainer.ranks == "auto" or trainer.nodes != "auto":
            yield "layout.trainer.nodes", str(after.trainer_nodes)
        if trainer.ranks != "auto":
            yield "layout.trainer.ranks", str(after.trainer_ranks)
    if after.engine_nodes != before.engine_nodes and (
        inference.nodes != "auto" or inference.replicas == "auto"
    ):
        yield "layout.inference.nodes", str(after.engine_nodes)


def _prefill_values(
    recipe: Recipe, before: PrefillChoice | None, after: PrefillChoice | None
) -> Iterator[tuple[str, str]]:
    layout = recipe.layout.inference.prefill
    if layout is None or before is None or after is None:
        return
    if after.tensor_parallel != before.tensor_parallel and layout.tensor_parallel != "auto":
        yield "layout.inference.prefill.tensor_parallel", str(after.tensor_parallel)
    if after.num_engines != before.num_engines and layout.replicas != "auto":
        yield "layout.inference.prefill.replicas", str(after.num_engines)


def _engine_changes(case: Case, choice: LayoutChoice, space: Space) -> Iterator[LayoutChoice]:
    gpus = choice.num_engines * choice.engine_gpus
    heads = [layer.attention.heads for layer, _ in case.shape.groups if layer.attention is not None]
    for factor in DOUBLINGS:
        tensor = choice.tensor_parallel * factor
        size = tensor * choice.data_parallel
        if any(count % tensor for count in heads) or (
            size > space.gpus_per_node and size % space.gpus_per_node
        ):
            continue
        if num := gpus // size:
            yield replace(choice, tensor_parallel=tensor, num_engines=num)


def _trainer_changes(case: Case, choice: LayoutChoice, space: Space) -> Iterator[LayoutChoice]:
    if choice.checkpointing != "full":
        choice = replace(choice, checkpointing="full", checkpointing_every=1)
        yield choice
    if not choice.optimizer_offload and not choice.cpu_offload:
        yield replace(choice, optimizer_offload=True)
    if not choice.activation_offload:
        yield replace(choice, activation_offload=True)
    for replicas in sorted(
        {1, choice.replicate // 2, choice.replicate // 4} - {0, choice.replicate}, reverse=True
    ):
        if choice.replicate % replicas == 0:
            yield replace(choice, replicate=replicas)
    shard = choice.trainer_ranks // choice.replicate
    for factor in DOUBLINGS:
        degree = choice.context_parallel * factor
        if shard % degree == 0 and degree <= choice.ranks_per_node:
            yield replace(choice, context_parallel=degree)
    yield from _more_nodes(case, choice, space)
    yield replace(choice, optimizer_offload=True, activation_offload=True, cpu_offload=False)
    yield replace(choice, cpu_offload=True, optimizer_offload=False)


def _more_nodes(case: Case, choice: LayoutChoice, space: Space) -> Iterator[LayoutChoice]:
    """Yield larger trainers: from nodes that are free, then from those of engines."""
    if choice.ranks_per_node < space.gpus_per_node:
        return  # both sides share a node
    free = space.nodes - choice.trainer_nodes - choice.engine_nodes - choice.prefill_nodes
    per_engine = -(-choice.engine_gpus // space.gpus_per_node)
    most = choice.trainer_nodes + free + max(0, choice.engine_nodes - per_engine)
    for nodes in range(choice.trainer_nodes + 1, most + 1):
        ranks = nodes * space.gpus_per_node
        if ranks % (choice.replicate * choice.context_parallel):
            continue
        taken = max(0, nodes - choice.trainer_nodes - free)
        engine_nodes = choice.engine_nodes - taken
        engines = choice.num_engines
        if taken:
            engines = engines * engine_nodes // choice.engine_nodes
        if choice.num_engines and not engines:
            continue
        experts = trainer_experts(case.recipe, ranks, space.gpus_per_node, case.shape.num_experts)
        yield replace(
            choice,
            trainer_nodes=nodes,
            trainer_ranks=ranks,
            trainer_expert_parallel=experts,
            engine_nodes=engine_nodes,
            num_engines=engines,
        )
