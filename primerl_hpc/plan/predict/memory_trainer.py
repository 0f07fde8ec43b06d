"""GPU memory of a trainer's rank, by part.

    setup = TrainerSetup(ranks=8, ranks_per_node=8, shard=8, seq_len=16384)
    memory = trainer_memory(known_shape("Qwen/Qwen3-4B"), setup)
    memory.reserved.value / 2**30                    # peak of torch.cuda.max_memory_reserved, in GiB
    memory.fits(gpu_bytes)                           # allocated memory and CUDA's context within the GPU

Weights, optimizer state and the gathered embedding and head exist in the complete step; of its phases the largest
counts:

    head        logits of a chunk, and the head's gradient; inputs of all blocks
    block       the last block, which runs backward first: inputs of all blocks, recomputed activations, gathered
                weights, gradients before they are reduced
    first_block the first block, which runs backward last: its input, and the gradients of all others
    root        gradients of embedding and head while they are reduced, and those of all blocks
    optimizer   gradients, and offloaded state that is on the GPU at a time

Gradients of an earlier micro-batch exist in all phases. `tools/bench/trainer_trace.py` follows each tensor of the
trainer's own step and compares. Constants that were fitted are in the description of the software
(`layouts.TrainerSoftware`); docs/prediction.md has their errors on published measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from primerl_hpc.plan.predict.architectures.parts import Layer, WeightKind
from primerl_hpc.plan.predict.figure import Figure, add, estimate, exact, largest, multiply
from primerl_hpc.plan.predict.layouts import DTYPE_BYTES, TrainerSetup, TrainerSoftware
from primerl_hpc.plan.predict.memory_activations import (
    PREFIX,
    input_bytes,
    kept_inputs,
    logits_of,
    one_input,
    working_set,
)
from primerl_hpc.plan.predict.shape import ModelShape

OPTIMIZER_BYTES = {"adamw": 8, "sgd": 4, "muon": 4, "sign_sgd": 0}
"""Bytes of optimizer state per parameter (`trainer.optim.optimizers.STATE_KINDS`, float32). With Muon, embeddings, head
and vectors use AdamW."""
OFFLOAD_BYTES = 1 << 30
"""Optimizer state on the GPU at a time with ``optimizer_offload`` (`trainer.optim.optimizers.OFFLOAD_BYTES`)."""
SMALL_PARAMETERS = (2 << 30) // 4
"""Largest model that is one group of weights (`trainer.parallel.fsdp.SMALL_BYTES`)."""
CONTEXT_BYTES = 1.0 * 2**30
"""CUDA context, cuBLAS workspaces and NCCL outside torch's allocator. vLLM logs 0.5–2 GiB as non-torch memory."""

# factors of the 80 % intervals
GATHERED, COLLECTIVES, CONTEXT = 1.3, 2.0, 1.8
REST = 1.03
"""Factor for what the formula leaves out: with it the intervals hold 75–85 % of the published rows, also of models that
the constants of their software were not fitted on (``planner_rows.py --held-out``)."""

SOURCE = "docs/prediction.md, section Memory of the trainer"


@dataclass(frozen=True)
class TrainerMemory:
    """Figures of one GPU, in bytes."""

    allocated: Figure
    """Peak that the tensors need: what must fit."""
    reserved: Figure
    """Peak that torch's allocator reserves: what `max_memory_reserved` reports, unless the GPU is nearly full."""
    context: Figure
    """Memory outside torch's allocator."""
    host: Figure
    """Host memory of one node for offloaded tensors, and for the copies that a save in the background writes."""

    @property
    def needed(self) -> Figure:
        """All memory of the GPU that the rank needs."""
        return add(PREFIX, "B", [self.allocated, self.context])

    def fits(self, gpu_bytes: float) -> bool:
        return self.needed.value <= gpu_bytes


def trainer_memory(
    shape: ModelShape, setup: TrainerSetup, software: TrainerSoftware = TrainerSoftware()
) -> TrainerMemory:
    """Return the memory of a rank. Raises ConfigError for layers that the trainer cannot train."""
    states, gradients = _states(shape, setup, software), _gradients(shape, setup)
    resident = [*states, _gathered_root(shape, setup), _collectives(setup, software)]
    kept, single_input = kept_inputs(shape, setup, software), one_input(shape, setup)
    (logits, logits_gradient), work = logits_of(shape, setup, software), working_set(shape, setup, software)
    backward = [_gathered_layers(shape, setup, software), _head_gradient(shape, setup, software)]
    earlier = [gradients] if setup.micro_batches > 1 else []

    def peak(name: str, factor: float) -> Figure:
        slack = exact(f"{PREFIX}.{name}.slack", factor, "1", "allocator's reserve", source=software.source)
        scaled_work = _scaled(work, slack)
        phases = {
            "head": [kept, _scaled(logits, slack), logits_gradient, *earlier],
            "block": [kept, scaled_work, *backward, *earlier],
            "first_block": [single_input, scaled_work, *backward, gradients],
            "root": [_reduced_root(shape, setup), gradients],
            "optimizer": [_optimizer_phase(setup), gradients],
        }
        largest_phase = largest(
            f"{PREFIX}.{name}.phase",
            "B",
            [add(f"{PREFIX}.{name}.{phase}_phase", "B", parts) for phase, parts in phases.items()],
        )
        total = add(f"{PREFIX}.{name}.parts", "B", [*resident, largest_phase], source=SOURCE)
        rest = estimate(f"{PREFIX}.{name}.rest", 1.0, REST, "1", "what the formula leaves out", source=SOURCE)
        return multiply(f"{PREFIX}.{name}", "B", [total, rest])

    context = estimate(
        f"{PREFIX}.context", CONTEXT_BYTES, CONTEXT, "B", "CUDA context and NCCL", source=SOURCE
    )
    return TrainerMemory(
        peak("allocated", 1.0), peak("reserved", software.reserve_factor), context, _host(shape, setup)
    )


def _scaled(figure: Figure, factor: Figure) -> Figure:
    return (
        figure
        if factor.value == 1
        else multiply(figure.name, "B", [figure.renamed(f"{figure.name}.allocated"), factor])
    )


# -- weights, gradients, optimizer -----------------------------------------------------------------


def trained_parameters(shape: ModelShape, setup: TrainerSetup, adapters: int = 1) -> int:
    """Return the number of parameters with a gradient."""
    if setup.lora_rank is not None:
        return adapters * shape.adapter_parameters(setup.lora_rank, setup.lora_targets)
    return shape.total if setup.trains_vision else shape.text_total


def _states(shape: ModelShape, setup: TrainerSetup, software: TrainerSoftware) -> list[Figure]:
    trained = trained_parameters(shape, setup, software.adapters)
    frozen = shape.total - (0 if setup.lora_rank is not None else trained)
    shards = setup.shard * setup.tensor_parallel
    frozen_bytes = software.frozen_bytes or DTYPE_BYTES[setup.param_dtype]
    on_gpu = 0 if setup.cpu_offload else 1
    weights = on_gpu * (4 * trained + frozen_bytes * frozen) / shards
    moments = (
        0.0 if setup.cpu_offload or setup.optimizer_offload else _moment_bytes(shape, setup, trained) / shards
    )
    common = {"trained": trained, "frozen": frozen, "shards": shards}
    return [
        exact(
            f"{PREFIX}.weights",
            weights,
            "B",
            "(4 × trained + frozen_bytes × frozen) / shards",
            {**common, "frozen_bytes": frozen_bytes},
            source=software.source,
        ),
        exact(
            f"{PREFIX}.optimizer",
            moments,
            "B",
            "bytes_per_parameter × trained / shards; 0 if offloaded",
            {**common, "optimizer": setup.optimizer},
            source=software.source,
        ),
    ]


def _gradients(shape: ModelShape, setup: TrainerSetup) -> Figure:
    trained, shards = trained_parameters(shape, setup), setup.shard * setup.tensor_parallel
    value = 0.0 if setup.cpu_offload else 4 * trained / shards
    if _is_one_group(shape, setup) and setup.lora_rank is None:
        value = 4.0 * trained / setup.tensor_parallel  # unsharded until the last micro-batch
    return exact(
        f"{PREFIX}.gradients", value, "B", "4 × trained / shards", {"trained": trained, "shards": shards}
    )


def _root_elements(shape: ModelShape) -> int:
    return (1 if shape.is_tied else 2) * shape.vocab * shape.hidden


def _head_extra(shape: ModelShape, setup: TrainerSetup) -> float:
    """Return the bytes that a float32 head needs in addition to those of ``param_dtype``."""
    more = DTYPE_BYTES["float32"] - DTYPE_BYTES[setup.param_dtype]
    return more * shape.vocab * shape.hidden / setup.tensor_parallel if setup.float32_head else 0


def _reduced_root(shape: ModelShape, setup: TrainerSetup) -> Figure:
    """Return the gradients of embedding and head, and the buffer in which they are reduced."""
    elements = 0 if setup.lora_rank is not None else _root_elements(shape) / setup.tensor_parallel
    each = DTYPE_BYTES[setup.param_dtype] + (DTYPE_BYTES[setup.reduce_dtype] if setup.shard > 1 else 0)
    return exact(
        f"{PREFIX}.root_gradient",
        each * elements + (_head_extra(shape, setup) if elements else 0),
        "B",
        "bytes × elements of embedding and head: gradients, and the buffer in which they are reduced",
        {"bytes": each, "elements": elements},
    )


def _moment_bytes(shape: ModelShape, setup: TrainerSetup, trained: int) -> float:
    total = OPTIMIZER_BYTES[setup.optimizer] * trained
    if setup.optimizer == "muon" and setup.lora_rank is None:
        vectors = sum(
            shape.parameters.get(kind, 0) for kind in (WeightKind.EMBEDDING, WeightKind.HEAD, WeightKind.NORM)
        )
        total += (OPTIMIZER_BYTES["adamw"] - OPTIMIZER_BYTES["muon"]) * vectors
    return total


def _optimizer_phase(setup: TrainerSetup) -> Figure:
    extra = OFFLOAD_BYTES if setup.optimizer_offload and not setup.cpu_offload else 0
    return exact(f"{PREFIX}.optimizer_phase", extra, "B", "offloaded state on the GPU at a time")


def _host(shape: ModelShape, setup: TrainerSetup) -> Figure:
    trained, shards = trained_parameters(shape, setup), setup.shard * setup.tensor_parallel
    moments = _moment_bytes(shape, setup, trained)
    states = moments if setup.optimizer_offload else 0
    if setup.cpu_offload:
        states = 8 * trained + moments + DTYPE_BYTES[setup.param_dtype] * (shape.total - trained)
    inputs = input_bytes(shape, setup) if setup.activation_offload else 0
    ranks = min(setup.ranks, setup.ranks_per_node)
    saved = {"none": 0.0, "weights": 4.0 * trained, "all": 4.0 * trained + moments}[setup.saves_copy_of]
    return exact(
        f"{PREFIX}.host",
        ranks * ((states + saved) / shards + inputs),
        "B",
        "ranks of a node × ((offloaded states + copy for a save in the background) / shards + inputs of blocks)",
        {"ranks": ranks, "states": states, "saved": saved, "shards": shards, "inputs": inputs},
    )


# -- gathered weights ------------------------------------------------------------------------------


def _is_one_group(shape: ModelShape, setup: TrainerSetup) -> bool:
    """True if all weights are gathered together, once per step."""
    return setup.shard > 1 and setup.reshard_after_forward == "auto" and shape.total <= SMALL_PARAMETERS


def _gathered_root(shape: ModelShape, setup: TrainerSetup) -> Figure:
    elements = _root_elements(shape)
    if _is_one_group(shape, setup):
        elements = shape.total
    value = DTYPE_BYTES[setup.param_dtype] * elements / setup.tensor_parallel + _head_extra(shape, setup)
    return exact(
        f"{PREFIX}.root",
        value,
        "B",
        "bytes × elements: embedding and head in the type of forward, gathered while the step runs",
        {"elements": elements, "bytes": DTYPE_BYTES[setup.param_dtype]},
    )


def _gathered_layers(shape: ModelShape, setup: TrainerSetup, software: TrainerSoftware) -> Figure:
    largest_layer = max(_gathered_parameters(layer, setup) for layer, _ in shape.groups)
    gathered = gradient = 0.0
    if setup.shard > 1 and not _is_one_group(shape, setup):
        gathered = software.gathered_layers * DTYPE_BYTES[setup.param_dtype] * largest_layer
        if setup.lora_rank is None:
            gradient = DTYPE_BYTES[setup.reduce_dtype] * largest_layer
    return estimate(
        f"{PREFIX}.gathered",
        gathered + gradient,
        GATHERED,
        "B",
        "layer × (layers × bytes + bytes of its gradient before it is reduced)",
        {"layer": largest_layer, "layers": software.gathered_layers},
        source=software.source,
    )


def _gathered_parameters(layer: Layer, setup: TrainerSetup) -> float:
    # routed experts are not divided by tensor parallelism
    dense = layer.parameters - layer.expert_parameters
    return dense / setup.tensor_parallel + layer.expert_parameters / setup.expert_parallel


def _collectives(setup: TrainerSetup, software: TrainerSoftware) -> Figure:
    value = software.collective_bytes if setup.ranks > 1 else 0.0
    return estimate(
        f"{PREFIX}.collectives", value, COLLECTIVES, "B", "buffers of collectives", source=software.source
    )


def _head_gradient(shape: ModelShape, setup: TrainerSetup, software: TrainerSoftware) -> Figure:
    elements = 0 if setup.lora_rank is not None else shape.vocab * shape.hidden / setup.tensor_parallel
    return exact(
        f"{PREFIX}.head_gradient",
        software.block_gradient_bytes * elements,
        "B",
        "bytes × vocabulary × width: the head's gradient while blocks run backward",
        {"elements": elements, "bytes": software.block_gradient_bytes},
        source=software.source,
    )
