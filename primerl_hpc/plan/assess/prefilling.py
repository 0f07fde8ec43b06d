"""Engines that only process prompts (``layout.inference.prefill``): memory, times, and how many a layout may have.

A decoding engine sends each prompt to a prefill engine, pulls the KV blocks and samples. So prompts take no time of
decoding engines, but every request waits for its prompt and for the transfer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from primerl_hpc.plan.assess.case import Case
from primerl_hpc.plan.assess.choice import LayoutChoice, PrefillChoice
from primerl_hpc.plan.assess.parts import Parts
from primerl_hpc.plan.pools import nodes_of
from primerl_hpc.plan.predict.figure import Figure
from primerl_hpc.plan.predict.timing.time_transfer import kv_transfer
from primerl_hpc.plan.simulation.sides import PrefillSide
from primerl_hpc.recipe.schema.layout import PrefillLayout

MEMORY = "memory.prefill"


def prefill_memory(parts: Parts, choice: PrefillChoice) -> Figure:
    """Return what a prefill engine needs of a GPU at least: all but the KV cache, and one longest sequence in it."""
    return parts.engine_memory(choice).moved("memory.engine", MEMORY)


def prompt_time(parts: Parts, choice: PrefillChoice) -> Figure:
    """Return the time of a group's prompt in a prefill engine with few others."""
    return parts.engine_times(choice).first_token(parts.case.prompt.value, name="time.prefill")


def transfer_time(parts: Parts, choice: LayoutChoice) -> Figure:
    """Return the time in which a decoding engine pulls the KV blocks of a prompt: each GPU its own part."""
    size = parts.sequence_bytes(choice).of(max(1, int(parts.case.prompt.value)))
    return kv_transfer(size, parts.case.engine_gpu)


def prefill_side(parts: Parts, choice: LayoutChoice, figures: dict[str, Figure]) -> PrefillSide | None:
    """Return the prefill engines for the simulation; None if there are none."""
    if choice.prefill is None:
        return None
    times, case = parts.engine_times(choice.prefill), parts.case
    turns = case.recipe.rollouts.expected.turns
    reply = case.distribution.mean / turns  # recomputed in the next turn: the decoding engine has its blocks
    return PrefillSide(
        choice.prefill.num_engines,
        prompt_s=times.prompt_s(case.prompt.value),
        alone_s=figures["time.prefill"].value,
        turn_s=times.prompt_s(reply) if turns > 1 else 0.0,
        transfer_s=figures["time.kv_transfer"].value,
    )


# -- search ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrefillSpace:
    """GPUs that prefill and decoding engines share."""

    gpus: int
    gpus_per_node: int
    is_one_node: bool


def prefill_choices(
    case: Case, parts: Parts, decoding: LayoutChoice, space: PrefillSpace
) -> Iterator[PrefillChoice | None]:
    """Yield the prefill engines that the recipe allows with decoding engines of the shape of ``decoding``.

    With ``replicas: auto`` these are the fewest, the numbers next to the split of the GPUs with which both kinds are
    equally busy, and twice as many; on several nodes only numbers that leave no GPU of their nodes idle. Yields None
    for a recipe without prefill engines.
    """
    layout = case.recipe.layout.inference
    if layout.prefill is None:
        yield None
        return
    shape = _shape(layout.prefill, decoding)
    if shape is None or (
        case.recipe.weights.transport == "broadcast" and shape.engine_gpus != decoding.engine_gpus
    ):
        return
    replicas = layout.prefill.replicas
    for number in [replicas] if replicas != "auto" else _numbers(parts, decoding, shape, space):
        nodes = 1 if space.is_one_node else nodes_of(number, shape.engine_gpus, space.gpus_per_node)
        yield PrefillChoice(
            number, shape.tensor_parallel, shape.data_parallel, shape.expert_parallel, nodes=nodes
        )


def _shape(prefill: PrefillLayout, decoding: LayoutChoice) -> PrefillChoice | None:
    """Return one engine of the recipe's shape; None if its KV blocks do not fit those of the decoding engines."""
    keys = ("tensor_parallel", "data_parallel", "expert_parallel")
    own = {key: getattr(prefill, key) for key in keys}
    shape = {key: getattr(decoding, key) if value == "auto" else value for key, value in own.items()}
    low, high = sorted((shape["tensor_parallel"], decoding.tensor_parallel))
    return None if high % low else PrefillChoice(1, **shape)


def _numbers(parts: Parts, decoding: LayoutChoice, shape: PrefillChoice, space: PrefillSpace) -> list[int]:
    case, gpus = parts.case, space.gpus
    group, turns = case.recipe.rollouts.group_size, case.recipe.rollouts.expected.turns
    times = parts.engine_times(shape)
    reply_s = times.prompt_s(case.distribution.mean / turns) if turns > 1 else 0.0
    running = max(1, min(parts.max_running(decoding), case.batch_size))
    token_s = parts.engine_times(decoding).decode_s(max(1.0, running / decoding.data_parallel), parts.context)
    decoding_gpu_s = decoding.engine_gpus * group * case.distribution.mean * token_s / running

    def balanced(copies: float) -> float:
        """Return the number of equally busy engines if each group's prompt is processed ``copies`` times."""
        work_s = copies * times.prompt_s(case.prompt.value) + group * (turns - 1) * reply_s
        prefill_gpu_s = shape.engine_gpus * work_s
        return gpus / shape.engine_gpus * prefill_gpu_s / (prefill_gpu_s + decoding_gpu_s)

    # rollouts of a group are spread over the engines, each of which processes the prompt once
    number = balanced(min(group, max(1.0, balanced(group))))
    unit = 1 if space.is_one_node else max(1, space.gpus_per_node // shape.engine_gpus)
    below, above = math.floor(number / unit) * unit, math.ceil(number / unit) * unit
    wanted = {unit, below, above, 2 * above}
    most = (gpus - decoding.engine_gpus) // shape.engine_gpus
    return sorted(count for count in wanted if 1 <= count <= most)
