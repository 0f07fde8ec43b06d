"""Decide ``auto``: enumerate layouts, prune by memory with reasons, rank by closed form, simulate the best.

    found = search(case, Space.of(recipe, profile))
    found.best.choice, found.simulated              # the chosen layout; the best ones, simulated

Deterministic: equal inputs give equal results; ties go to the layout with fewer GPUs per engine, then to the first.
Explicit values of the recipe are never changed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from primerl_hpc.common.names import Kind
from primerl_hpc.plan.assess.case import Case
from primerl_hpc.plan.assess.choice import LayoutChoice, PrefillChoice, is_counted
from primerl_hpc.plan.assess.parts import Parts
from primerl_hpc.plan.assess.prediction import Prediction, predict
from primerl_hpc.plan.assess.prefilling import PrefillSpace, prefill_choices
from primerl_hpc.plan.assess.variants import VARIANT_FIELDS, fastest_variant
from primerl_hpc.plan.degrees import check_even_ranks
from primerl_hpc.recipe.schema.recipe import Recipe

NUM_SIMULATED = 8
MAX_SPLITS = 16
"""Numbers of trainer nodes that are tried."""
NEAR = 0.02
"""Layouts whose step times differ by less are equal; the one with more idle engines and less staleness is simpler."""
_AUTO_KEYS = {
    "inference": ("tensor_parallel", "data_parallel", "expert_parallel", "nodes", "replicas"),
    "prefill": ("replicas", "tensor_parallel", "data_parallel", "expert_parallel"),
    "trainer": ("nodes", "ranks", "context_parallel", "tensor_parallel", "replicate"),
    "config": ("activation_checkpointing", "activation_offload", "optimizer_offload", "cpu_offload"),
}


@dataclass(frozen=True)
class Space:
    """Nodes that the policy's engines and the trainer may use, and GPUs of each."""

    nodes: int
    gpus_per_node: int


@dataclass
class SearchResult:
    best: Prediction | None
    """The layout to use, simulated; None if none fits."""
    simulated: list[Prediction] = field(default_factory=list)
    """The best by closed form, best first."""
    num_layouts: int = 0
    pruned: Counter[str] = field(default_factory=Counter)
    """Number of layouts by the reason for which they were not considered."""
    nearest: Prediction | None = None
    """If none fits: the layout that is closest to fitting."""

    @property
    def reason(self) -> str:
        """Return why no layout can be used, and what the closest one lacks; empty if there is one."""
        if self.best is not None:
            return ""
        if not self.num_layouts:
            return "no layout has these sizes on these nodes"
        why = ", ".join(f"{number} by {reason}" for reason, number in self.pruned.most_common())
        closest = f"; the closest is {self.nearest.choice}: {self.nearest.misfits[0]}" if self.nearest else ""
        return f"none of {self.num_layouts} layouts can be used ({why}){closest}"


def has_auto(recipe: Recipe) -> bool:
    """True if a value of the recipe is left to the search."""
    blocks = {
        "inference": recipe.layout.inference,
        "trainer": recipe.layout.trainer,
        "config": recipe.trainer,
        "prefill": recipe.layout.inference.prefill,
    }
    keys = [(blocks[block], key) for block, names in _AUTO_KEYS.items() for key in names if blocks[block]]
    if is_counted(recipe):
        keys = [(block, key) for block, key in keys if key != "nodes"]
    if recipe.kind == Kind.SFT:
        engines = (recipe.layout.inference, recipe.layout.inference.prefill)
        keys = [(block, key) for block, key in keys if all(block is not other for other in engines)]
    return recipe.rollouts.max_in_flight == "auto" or any(
        getattr(block, key) == "auto" for block, key in keys
    )


def search(
    case: Case, space: Space, *, num_simulated: int = NUM_SIMULATED, is_complete: bool = False
) -> SearchResult:
    """Return the best layout of ``space``, and others that were simulated.

    ``is_complete``: simulate also layouts that cannot be the best: their step time without waits is longer than the
    simulated one, with waits, of another layout.
    """
    parts = Parts(case)
    result = SearchResult(None)
    ranked: list[tuple[float, int, Prediction]] = []
    misfits: list[Prediction] = []
    for number, choice in enumerate(_candidates(case, space, parts, result)):
        prediction = predict(case, choice, parts=parts, depth="closed_form")
        if not prediction.fits:
            result.pruned[_family_of(prediction)] += 1
            misfits.append(prediction)
        elif _has_step(prediction):
            ranked.append((prediction.figures["time.step"].value, number, prediction))
        else:
            result.pruned[prediction.absent.get("time.step", "the step time is not predicted")] += 1
    ranked.sort(key=lambda item: (item[0], item[2].choice.engine_gpus, item[1]))
    fastest = math.inf
    for choice in (item[2].choice for item in ranked[:num_simulated]):
        simulated = _with_in_flight(case, choice, parts, math.inf if is_complete else fastest)
        if simulated is not None:
            result.simulated.append(simulated)
            fastest = min(fastest, simulated.figures["time.step"].value)
    result.simulated.sort(key=lambda item: (item.figures["time.step"].value, item.choice.engine_gpus))
    if result.simulated:
        result.best = _simplest(result.simulated)
    elif misfits:
        result.nearest = min(misfits, key=lambda item: sum(misfit.excess for misfit in item.misfits))
    return result


def has_layout(case: Case, space: Space) -> bool:
    """True if `search` finds a layout; it ends at the first one, and simulates none."""
    parts = Parts(case)
    predictions = (
        predict(case, choice, parts=parts, depth="closed_form")
        for choice in _candidates(case, space, parts, SearchResult(None))
    )
    return any(prediction.fits and _has_step(prediction) for prediction in predictions)


def _has_step(prediction: Prediction) -> bool:
    return "time.step" in prediction.figures


def _candidates(case: Case, space: Space, parts: Parts, result: SearchResult) -> Iterator[LayoutChoice]:
    """Yield each split and engine shape with the fastest variant of the trainer that fits, or with the last one.

    The trainer's options do not change the engines, so the others would lose.
    """
    best: dict[tuple[int, int], tuple[LayoutChoice, int, int]] = {}
    for base in layouts(case, space, parts):
        if not base.trainer_ranks:
            result.num_layouts += 1
            yield base
            continue
        key = (base.trainer_ranks, base.ranks_per_node)
        if key not in best:
            best[key] = fastest_variant(case, base, parts)
        variant, number, misfits = best[key]
        result.num_layouts += number
        if 0 < misfits < number:
            result.pruned["memory of trainer"] += misfits
        yield replace(base, **{name: getattr(variant, name) for name in VARIANT_FIELDS})


def _simplest(simulated: list[Prediction]) -> Prediction:
    """Return the fastest; among equally fast ones the one with the smallest engines and the least discarded work."""
    fastest = simulated[0].figures["time.step"].value
    near = [item for item in simulated if item.figures["time.step"].value <= fastest * (1 + NEAR)]

    def cost(item: Prediction) -> tuple[float, ...]:
        discarded = item.run.discarded if item.run is not None else 0.0
        return (round(discarded, 2), item.choice.engine_gpus, item.figures["time.step"].value)

    return min(near, key=cost)


def _step_s(choice: LayoutChoice, case: Case, parts: Parts) -> float:
    """Return the step time without waits."""
    return predict(case, choice, parts=parts, depth="closed_form").figures["time.step"].value


def _with_in_flight(case: Case, choice: LayoutChoice, parts: Parts, fastest: float) -> Prediction | None:
    """Simulate the layout; with ``max_in_flight: auto`` try several numbers, and return the best one.

    A number is not simulated if its step would take longer than ``fastest``, or than that of another number, even
    without waits. Returns None if no number is simulated.
    """
    best: Prediction | None = None
    for other in reversed(_in_flight(case, choice, parts)):  # the largest number is the fastest without waits
        if _step_s(other, case, parts) > fastest * (1 + NEAR):
            break
        tried = predict(case, other, parts=parts, depth="quick")
        if best is None or tried.figures["time.step"].value <= best.figures["time.step"].value + 1e-3:
            best = tried
        fastest = min(fastest, best.figures["time.step"].value)
    return best


def _in_flight(case: Case, choice: LayoutChoice, parts: Parts) -> list[LayoutChoice]:
    rollouts = case.recipe.rollouts
    if case.recipe.kind != Kind.RL or rollouts.max_in_flight != "auto":
        return [choice]
    room = parts.max_running(choice) * choice.num_engines
    most = min(room, case.batch_size * (2 + rollouts.max_age))
    steps = (most, min(most, 2 * case.batch_size), min(most, case.batch_size))
    size = rollouts.group_size
    numbers = sorted({max(size, int(number) // size * size) for number in steps})
    return [replace(choice, max_in_flight=number) for number in numbers]


def _family_of(prediction: Prediction) -> str:
    roles = sorted({misfit.role for misfit in prediction.misfits})
    return f"memory of {' and '.join(roles)}"


# -- enumeration -----------------------------------------------------------------------------------


def layouts(case: Case, space: Space, parts: Parts | None = None) -> Iterator[LayoutChoice]:
    """Yield the layouts that the recipe's explicit values allow, in a fixed order."""
    recipe, parts = case.recipe, parts or Parts(case)
    shapes = [(1, 1, False)] if recipe.kind == Kind.SFT else list(_engine_shapes(case, space))
    for engine_nodes, engine_gpus, trainer_nodes, ranks in _splits(recipe, space):
        shares_node = trainer_nodes > 0 and engine_nodes + trainer_nodes > space.nodes
        for tensor, data, is_expert in shapes:
            base = LayoutChoice(
                num_engines=0,
                tensor_parallel=tensor,
                data_parallel=data,
                expert_parallel=is_expert,
                trainer_ranks=ranks,
                ranks_per_node=ranks // max(1, trainer_nodes),
                replicate=recipe.layout.trainer.num_replicas,
                trainer_tensor_parallel=recipe.layout.trainer.tensor_degree,
                max_in_flight=recipe.rollouts.in_flight_ceiling if recipe.kind == Kind.RL else 0,
                trainer_nodes=trainer_nodes,
                shares_node=shares_node,
                is_colocated=recipe.layout.colocated is not None,
            )
            if not recipe.has_engines or recipe.kind == Kind.SFT:
                yield base  # engines of evaluations are not searched
                continue
            per_node = space.gpus_per_node
            shared = PrefillSpace(engine_gpus, per_node, is_one_node=shares_node or space.nodes == 1)
            for prefill in prefill_choices(case, parts, base, shared):
                free = _without_prefill(case, space, engine_nodes, trainer_nodes, engine_gpus, prefill)
                if free is not None and (engines := _engines_on(recipe, base, *free, per_node)):
                    yield replace(base, num_engines=engines[0], engine_nodes=engines[1], prefill=prefill)


def _without_prefill(
    case: Case, space: Space, nodes: int, trainer_nodes: int, gpus: int, prefill: PrefillChoice | None
) -> tuple[int, int] | None:
    """Return the nodes and GPUs that prefill engines leave to the others; None if none remain.

    A recipe that fixes the nodes of the decoding engines has those of prefill engines in addition.
    """
    recipe = case.recipe
    if prefill is None or recipe.layout.inference.prefill is None:
        return nodes, gpus
    if recipe.layout.inference.prefill.node_type != recipe.layout.inference.node_type:
        return nodes, gpus  # on nodes of their own type
    if trainer_nodes + nodes > space.nodes or space.nodes == 1:  # they share one node
        left = gpus - prefill.num_engines * prefill.engine_gpus
        return (nodes, left) if left > 0 else None
    if recipe.layout.inference.nodes == "auto":
        nodes = space.nodes - trainer_nodes - prefill.nodes
    elif nodes + trainer_nodes + prefill.nodes > space.nodes:
        return None
    return (nodes, nodes * space.gpus_per_node) if nodes > 0 else None


def _engines_on(
    recipe: Recipe, base: LayoutChoice, nodes: int, gpus: int, per_node: int
) -> tuple[int, int] | None:
    """Return the number of engines on these nodes, and how many nodes they use; None if the planner refuses it."""
    engines = _num_engines(recipe, base.engine_gpus, nodes, gpus)
    if not engines:
        return None
    used = _used_nodes(engines, base.engine_gpus, nodes, per_node)
    if used < nodes and recipe.layout.inference.nodes != "auto":
        return None  # the planner refuses nodes without an engine
    return engines, used


def _splits(recipe: Recipe, space: Space) -> Iterator[tuple[int, int, int, int]]:
    """Yield (engine nodes, engine GPUs, trainer nodes, trainer ranks)."""
    inference, trainer = recipe.layout.inference, recipe.layout.trainer
    per_node, is_trained = space.gpus_per_node, recipe.kind in (Kind.RL, Kind.SFT)
    if not is_trained:
        nodes = space.nodes if inference.nodes == "auto" else inference.nodes
        yield nodes, nodes * per_node, 0, 0
        return
    if not recipe.has_engines or recipe.kind == Kind.SFT:
        nodes = trainer.nodes if trainer.nodes != "auto" else 1
        yield 0, 0, nodes, _ranks(recipe, nodes, per_node)
        return
    if recipe.layout.colocated is not None:  # both sides use all GPUs
        gpus = space.nodes * per_node
        yield space.nodes, gpus, space.nodes, gpus
        return
    if space.nodes == 1 and inference.nodes == "auto" and trainer.nodes == "auto":
        for ranks in range(1, per_node) if trainer.ranks == "auto" else (trainer.ranks,):
            yield 1, per_node - ranks, 1, ranks
        return
    for nodes in _trainer_nodes(recipe, space):
        engine_nodes = inference.nodes if inference.nodes != "auto" else space.nodes - nodes
        if engine_nodes >= 1 and engine_nodes + nodes <= space.nodes:
            yield engine_nodes, engine_nodes * per_node, nodes, _ranks(recipe, nodes, per_node)


def _ranks(recipe: Recipe, nodes: int, per_node: int) -> int:
    """Return the number of ranks. Raises ConfigError if the recipe's ranks cannot be divided among its nodes."""
    trainer = recipe.layout.trainer
    if trainer.ranks == "auto":
        return nodes * per_node
    if trainer.nodes != "auto":
        check_even_ranks(trainer.ranks, nodes, per_node)
    return trainer.ranks


def _trainer_nodes(recipe: Recipe, space: Space) -> list[int]:
    trainer = recipe.layout.trainer
    if trainer.nodes != "auto":
        return [trainer.nodes]
    if trainer.ranks != "auto":
        return [-(-trainer.ranks // space.gpus_per_node)]
    most = space.nodes - 1
    if most <= MAX_SPLITS:
        return list(range(1, most + 1))
    spread = {round(most * index / MAX_SPLITS) for index in range(1, MAX_SPLITS)} | {1, 2, 4, 8}
    return sorted(nodes for nodes in spread if 1 <= nodes <= most)


def _num_engines(recipe: Recipe, size: int, nodes: int, gpus: int) -> int:
    """Return the replicas of ``size`` GPUs that fit; 0 if none fits or replicas do not."""
    replicas = recipe.layout.inference.replicas
    if size > gpus:
        return 0
    per_node = gpus // nodes
    most = nodes * (per_node // size) if size <= per_node else nodes // -(-size // per_node)
    if replicas == "auto":
        return most
    return replicas if replicas <= most else 0


def _used_nodes(engines: int, size: int, nodes: int, per_node: int) -> int:
    """Return how many of ``nodes`` the engines occupy; only those of several nodes each can leave some free."""
    return engines * (size // per_node) if size > per_node else nodes


def _engine_shapes(case: Case, space: Space) -> Iterator[tuple[int, int, bool]]:
    """Yield (tensor_parallel, data_parallel, expert_parallel). Tensor parallelism divides the attention heads."""
    layout, shape = case.recipe.layout.inference, case.shape
    heads = [layer.attention.heads for layer, _ in shape.groups if layer.attention is not None]
    powers = [2**power for power in range(7)]
    for tensor in powers if layout.tensor_parallel == "auto" else [layout.tensor_parallel]:
        if layout.tensor_parallel == "auto" and any(count % tensor for count in heads):
            continue
        has_data = shape.is_mixture and case.recipe.layout.colocated is None
        data_degrees = powers if layout.data_parallel == "auto" and has_data else [1]
        for data in data_degrees if layout.data_parallel == "auto" else [layout.data_parallel]:
            size, per_node = tensor * data, space.gpus_per_node
            if size > space.nodes * per_node or (size > per_node and size % per_node):
                continue
            if data > 1 and tensor > per_node:
                continue  # the planner refuses data-parallel ranks that span nodes
            if layout.expert_parallel == "auto":
                yield tensor, data, shape.is_mixture and data > 1
            else:
                yield tensor, data, layout.expert_parallel
