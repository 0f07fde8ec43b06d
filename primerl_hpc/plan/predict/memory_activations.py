"""Activations and logits of a trainer's rank: what forward keeps, the peak of a block and of the head.

See `memory_trainer`, which adds them up by phase of the step.
"""

from __future__ import annotations

import math

from primerl_hpc.plan.predict.architectures.activations import (
    kept_elements,
    kept_products,
    recomputed_elements,
    working_elements,
)
from primerl_hpc.plan.predict.architectures.parts import Layer
from primerl_hpc.plan.predict.figure import Figure, estimate, exact
from primerl_hpc.plan.predict.layouts import DTYPE_BYTES, TrainerSetup, TrainerSoftware
from primerl_hpc.plan.predict.shape import ModelShape

PREFIX = "memory.trainer"
WORK, LOGITS = 1.10, 1.05
"""Factors of the 80 % intervals."""
CHUNK_LOGIT_BYTES, MIN_CHUNK, MAX_CHUNK = 1536 << 20, 64, 8192
"""``head_chunk_tokens: auto`` on a GPU (`trainer.model.head`)."""
HELD_INPUTS = 1
"""Inputs of blocks on the GPU with ``activation_offload``, besides the one in use: fitted to three pairs of published
rows with and without offload, which differ by all inputs but about one."""
HEAD_INPUTS = 5
"""Copies of the hidden states between the last block and the logits, in the type of forward: float32 and normed ones,
and those of the trained tokens."""
EXPERT_BUFFERS = 2
"""Copies of routed tokens in the send and receive buffers of expert parallelism."""


# -- activations -----------------------------------------------------------------------------------


def input_bytes(shape: ModelShape, setup: TrainerSetup) -> float:
    """Bytes of the inputs of all checkpointed blocks of a rank."""
    layers = -(-len(shape.layers) // setup.every)
    return DTYPE_BYTES[setup.param_dtype] * layers * shape.hidden * setup.row_tokens / setup.tensor_parallel


def kept_inputs(shape: ModelShape, setup: TrainerSetup, software: TrainerSoftware) -> Figure:
    """Activations that forward keeps for backward: inputs of recomputed blocks, everything of the others."""
    tokens = setup.row_tokens / setup.tensor_parallel
    bytes_each = DTYPE_BYTES[setup.param_dtype]
    total = 0.0
    for index, layer in enumerate(shape.layers):
        if setup.checkpointing == "full" and index % setup.every == 0:
            total += shape.hidden
        else:
            total += _kept_of(layer, shape.hidden, setup, software, is_chosen=index % setup.every == 0)
            total += gathered_inputs(layer, shape.hidden, setup)
    if setup.activation_offload:
        total = shape.hidden * HELD_INPUTS
    is_counted = setup.checkpointing == "full" and setup.every == 1
    return estimate(
        f"{PREFIX}.activations",
        bytes_each * tokens * total,
        1.0 if is_counted else WORK,
        "B",
        "bytes × tokens × elements kept per token by all layers",
        {"bytes": bytes_each, "tokens": tokens, "elements": total, "checkpointing": setup.checkpointing},
        source="elements: plan/predict/architectures/activations.py",
    )


def gathered_inputs(layer: Layer, hidden: int, setup: TrainerSetup) -> float:
    """Return elements per own token of the inputs that tensor parallelism gathers: of attention and of a dense MLP."""
    if setup.tensor_parallel == 1:
        return 0.0
    return (1 if layer.expert_parameters else 2) * hidden * setup.tensor_parallel


def one_input(shape: ModelShape, setup: TrainerSetup) -> Figure:
    tokens = setup.row_tokens / setup.tensor_parallel
    return exact(
        f"{PREFIX}.input",
        DTYPE_BYTES[setup.param_dtype] * tokens * shape.hidden,
        "B",
        "bytes × tokens × width: the input of a block",
    )


def _kept_of(
    layer: Layer, hidden: int, setup: TrainerSetup, software: TrainerSoftware, *, is_chosen: bool
) -> float:
    # in float32, norms and rotations cast nothing, so what trained weights add is not copied
    is_trained = setup.lora_rank is None and setup.param_dtype != "float32"
    kept = kept_elements(layer, hidden, is_trained=is_trained)
    if setup.checkpointing != "selective" or not is_chosen:
        return kept.dense + kept.experts
    if software.keeps_products:
        return kept_products(layer, hidden)
    modules = setup.checkpointed_modules
    hidden_kept, mixer = kept.hidden, kept.mixer
    if any(name.endswith(("self_attn", "attention")) for name in modules):
        mixer = 0.0
        hidden_kept -= hidden if is_trained else 0  # the mixer's output is not kept either
    is_mlp = any(name.endswith("mlp") for name in modules)
    is_expert = is_mlp or any(name.endswith("experts") for name in modules)
    return hidden_kept + mixer + (0.0 if is_mlp else kept.mlp) + (0.0 if is_expert else kept.experts)


def working_set(shape: ModelShape, setup: TrainerSetup, software: TrainerSoftware) -> Figure:
    tokens = setup.row_tokens / setup.tensor_parallel
    elements = max(_work_elements(layer, shape, setup, software) for layer, _ in shape.groups)
    if setup.tensor_parallel > 1:  # the gradient of an input, and the inputs that forward did not keep
        kept = setup.checkpointing == "none"
        gathered = max(gathered_inputs(layer, shape.hidden, setup) for layer, _ in shape.groups)
        elements += shape.hidden * setup.tensor_parallel + (0.0 if kept else gathered)
    bytes_each = DTYPE_BYTES[setup.param_dtype]
    return estimate(
        f"{PREFIX}.working_set",
        bytes_each * tokens * elements,
        WORK,
        "B",
        "bytes × tokens × elements per token of the block that is recomputed and run backward",
        {"bytes": bytes_each, "tokens": tokens, "elements": elements},
        source=software.source,
    )


def _work_elements(layer: Layer, shape: ModelShape, setup: TrainerSetup, software: TrainerSoftware) -> float:
    is_trained = setup.lora_rank is None
    rows = received_rows(shape, setup.expert_parallel) if setup.expert_parallel > 1 else None
    kept = kept_elements(layer, shape.hidden)
    if setup.is_compiled:  # by fused kernels, without copies in float32
        needed = working_elements(layer, shape.hidden)
        copies = software.dense_copies if is_trained else software.frozen_dense_copies
        dense, routed = needed.dense * copies, needed.experts * software.expert_copies
        if rows is not None and needed.experts:
            routed += EXPERT_BUFFERS * shape.experts_per_token * shape.hidden
    else:
        needed = recomputed_elements(layer, shape.hidden, is_trained=is_trained, rows=rows)
        kept = kept_elements(layer, shape.hidden, is_trained=is_trained)
        dense, routed = needed.dense, needed.experts
    if setup.checkpointing == "none" and setup.param_dtype != "float32":
        # what the block kept is counted with the activations of all layers
        dense = max(dense - kept.dense, 2.0 * shape.hidden)
        routed = max(routed - kept.experts, 0.0)
    return dense + routed


def received_rows(shape: ModelShape, ranks: int) -> float:
    """Return the rows that a rank receives for each of its own tokens, if all experts are chosen equally often.

    A token is sent once to each rank that holds at least one of its experts.
    """
    experts, chosen = shape.num_experts, shape.experts_per_token
    if not experts:
        return 0.0
    others = experts - experts // ranks
    return ranks * (1 - math.comb(others, chosen) / math.comb(experts, chosen))


# -- logits ----------------------------------------------------------------------------------------


def chunk_tokens(shape: ModelShape, setup: TrainerSetup) -> int:
    """Return the tokens whose logits are computed at a time."""
    if setup.head_chunk_tokens != "auto":
        return setup.head_chunk_tokens
    return min(max(CHUNK_LOGIT_BYTES // (4 * shape.vocab), MIN_CHUNK), MAX_CHUNK)


def logits_of(shape: ModelShape, setup: TrainerSetup, software: TrainerSoftware) -> list[Figure]:
    """Return logits and gradient of the head at the larger peak: of forward, of backward's chunks, or after them."""
    vocab, tokens = shape.vocab / setup.tensor_parallel, setup.row_tokens
    matrix = 0.0 if setup.lora_rank is not None else vocab * shape.hidden
    each = min(chunk_tokens(shape, setup), tokens) if software.has_chunked_head else tokens
    whole = software.head_gradient_bytes * matrix
    if software.has_chunked_head:
        peaks = [
            (software.chunk_bytes * each * vocab, 0.0),
            (software.chunk_backward_bytes * each * vocab, software.chunk_gradient_bytes * matrix),
            (0.0, whole),
        ]
    else:
        peaks = [(software.logit_bytes * tokens * vocab, whole)]
    logits, gradient = max(peaks, key=sum)
    inputs = 0 if setup.is_compiled else HEAD_INPUTS
    if setup.tensor_parallel > 1:
        inputs += 2  # gathered from the ranks that share a row, and its gradient
    return [
        estimate(
            f"{PREFIX}.logits",
            logits + inputs * DTYPE_BYTES[setup.param_dtype] * tokens * shape.hidden,
            LOGITS,
            "B",
            "bytes × tokens of a chunk × vocabulary + inputs × bytes × tokens × width",
            {"tokens": each, "vocabulary": vocab, "inputs": inputs},
            source=software.source,
        ),
        exact(
            f"{PREFIX}.logits_gradient",
            gradient,
            "B",
            "bytes × vocabulary × width: the head's gradient while logits exist",
            {"elements": matrix},
            source=software.source,
        ),
    ]
