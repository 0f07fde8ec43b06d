"""GPU memory of an engine: weights, KV cache and the rest, and how many tokens and sequences the KV cache holds.

    memory = engine_memory(known_shape("Qwen/Qwen3-30B-A3B"), setup, gpu_bytes=79.2 * 2**30)
    memory.kv_tokens.value                     # of a data-parallel rank
    memory.concurrency(8192).value             # sequences of 8,192 tokens of the complete replica
    memory.fits                                # a sequence of max_model_len has space

As in vLLM, the KV cache gets what weights, activations and memory outside torch leave of
``gpu_memory_utilization`` × the GPU's memory. Layers with a window keep only the window's tokens, and linear attention
a state of constant size.
"""

from __future__ import annotations

from dataclasses import dataclass

from primerl_hpc.plan.predict.architectures.parts import Layer, Matrix, WeightKind
from primerl_hpc.plan.predict.figure import Figure, add, estimate, exact
from primerl_hpc.plan.predict.layouts import DTYPE_BYTES, EngineSetup
from primerl_hpc.plan.predict.shape import ModelShape

PREFIX = "memory.engine"
GIB = 2**30

SCALE_BYTES = {"fp8": 4 / 128**2, "fp4": 1 / 32, "int4": 2 / 32, "int8": 0.0}
"""Bytes of scales per weight: blocks of 128 × 128 (fp8), of 32 with one byte (mxfp4) or two (int4)."""
PADDED_VOCAB = 64
"""vLLM pads the vocabulary to a multiple of this."""
SAMPLER_BYTES = 41
"""Bytes per logit while all sequences are sampled at once. Fitted to one log: 1.26 GiB for 256 sequences and 128,256
entries, with one and with two GPUs (vllm-project/vllm pull request 10511)."""
CONTEXT_BYTES, PARALLEL_CONTEXT_BYTES = 0.6 * GIB, 1.2 * GIB
"""Memory outside torch with one GPU, and with NCCL. Published logs have 0.1 to 1.8 and 0.2 to 3.6 GiB (12330, 13061,
14447 and 10511 of vllm-project/vllm): the width of the interval."""
GRAPH_BYTES = 0.6 * GIB
"""CUDA graphs of all captured sizes; published logs have 0.1 to 1.5 GiB."""
STATE_BYTES = 4
"""Bytes per element of linear-attention states, which vLLM keeps in float32."""

# factors of the 80 % intervals
WEIGHTS, ACTIVATIONS, CONTEXT, GRAPHS = 1.01, 1.4, 3.0, 2.2


def default_limits(gpu_bytes: float, gpu: str) -> tuple[int, int]:
    """Return vLLM's defaults of ``max_num_seqs`` and ``max_num_batched_tokens`` for a server on a GPU type.

    Source: ``EngineArgs.get_batch_defaults`` of vLLM 0.31, for its API server.
    """
    if gpu_bytes >= 160 * GIB:
        return 1024, 16_384
    return (1024, 8192) if gpu_bytes >= 70 * GIB and "a100" not in gpu.lower() else (256, 2048)


@dataclass(frozen=True)
class EngineMemory:
    """Figures of one GPU in bytes, and capacities in tokens and sequences."""

    weights: Figure
    activations: Figure
    graphs: Figure
    context: Figure
    kv: Figure
    """KV cache of one GPU; 0 if nothing is left."""
    kv_tokens: Figure
    """Tokens that the KV cache of a data-parallel rank holds, in sequences of ``max_model_len``."""
    total: Figure
    """All memory that the engine uses of a GPU."""
    sequence_bytes: SequenceBytes
    max_model_len: int
    data_parallel: int
    max_num_seqs: int

    @property
    def fits(self) -> bool:
        """True if the KV cache holds one sequence of ``max_model_len`` tokens; vLLM does not start otherwise."""
        return self.kv.value >= self.sequence_bytes.of(self.max_model_len)

    def concurrency(self, tokens: int) -> Figure:
        """Return how many sequences of this length run at a time in the replica: limited by the KV cache or
        ``max_num_seqs``."""
        each = self.sequence_bytes.of(tokens)
        most = self.max_num_seqs * self.data_parallel
        low, value, high = (
            min(self.data_parallel * end / each, most) for end in (self.kv.low, self.kv.value, self.kv.high)
        )
        return Figure(
            f"{PREFIX}.concurrency",
            value,
            low,
            high,
            "1",
            "min(data_parallel × kv / bytes of a sequence, data_parallel × max_num_seqs)",
            {"kv": self.kv, "tokens": tokens, "sequence_bytes": each, "max_num_seqs": self.max_num_seqs},
        )


@dataclass(frozen=True)
class SequenceBytes:
    """Bytes that one sequence occupies in the KV cache of a GPU."""

    full: float
    """Per token of layers that keep all tokens."""
    windows: tuple[tuple[int, float], ...]
    """Window and bytes per token of layers with a window."""
    state: float
    """Linear-attention states, for any length."""
    block_size: int

    def of(self, tokens: int) -> float:
        blocks = -(-tokens // self.block_size) * self.block_size
        within = sum(size * min(blocks, window + self.block_size) for window, size in self.windows)
        return self.full * blocks + within + self.state


def engine_memory(shape: ModelShape, setup: EngineSetup, gpu_bytes: float) -> EngineMemory:
    """Return the memory of an engine's GPU. ``gpu_bytes``: the total that the driver reports."""
    weights, activations = _weights(shape, setup), _activations(shape, setup)
    graphs = estimate(
        f"{PREFIX}.graphs",
        0.0 if setup.enforce_eager else GRAPH_BYTES,
        GRAPHS,
        "B",
        "CUDA graphs of all captured batch sizes; 0 with enforce_eager",
        source="logs of vLLM",
    )
    context = estimate(
        f"{PREFIX}.context",
        PARALLEL_CONTEXT_BYTES if setup.gpus > 1 else CONTEXT_BYTES,
        CONTEXT,
        "B",
        "CUDA context, libraries and NCCL, outside torch",
        source="logs of vLLM",
    )
    parts = [weights, activations, context, graphs]
    used = add(f"{PREFIX}.without_kv", "B", parts)
    kv = _kv(setup, gpu_bytes, used)
    each = sequence_bytes(shape, setup)
    return EngineMemory(
        weights,
        activations,
        graphs,
        context,
        kv,
        _tokens(setup, kv, each),
        add(PREFIX, "B", [*parts, kv.renamed(f"{PREFIX}.kv")]),
        each,
        setup.max_model_len,
        setup.data_parallel,
        setup.max_num_seqs,
    )


def _kv(setup: EngineSetup, gpu_bytes: float, used: Figure) -> Figure:
    inputs: dict[str, float | str | Figure] = {
        "gpu_memory": gpu_bytes,
        "gpu_memory_utilization": setup.gpu_memory_utilization,
        used.name: used,
    }
    if setup.kv_cache_bytes is not None:
        return exact(f"{PREFIX}.kv", setup.kv_cache_bytes, "B", "inference.kv_cache_gib", inputs)
    limit = setup.gpu_memory_utilization * gpu_bytes
    low, value, high = (max(limit - end, 0.0) for end in (used.high, used.value, used.low))
    formula = "gpu_memory_utilization × gpu_memory − weights − activations − context − graphs"
    return Figure(f"{PREFIX}.kv", value, low, high, "B", formula, inputs)


def _tokens(setup: EngineSetup, kv: Figure, each: SequenceBytes) -> Figure:
    longest = each.of(setup.max_model_len)

    def tokens(available: float) -> float:
        blocks = available / longest * setup.max_model_len / setup.block_size if longest else 0.0
        return float(int(blocks)) * setup.block_size

    return Figure(
        f"{PREFIX}.kv_tokens",
        tokens(kv.value),
        tokens(kv.low),
        tokens(kv.high),
        "tokens",
        "kv / bytes of a sequence of max_model_len × max_model_len, in complete blocks",
        {"kv": kv, "sequence_bytes": longest, "max_model_len": setup.max_model_len},
    )


# -- weights ---------------------------------------------------------------------------------------


def stored_bytes(dtype: str) -> float:
    """Return bytes per weight in this type, with its scales."""
    return DTYPE_BYTES[dtype] + SCALE_BYTES.get(dtype, 0.0)


def _weights(shape: ModelShape, setup: EngineSetup) -> Figure:
    tensor = setup.tensor_parallel
    blocks = sum(number * _layer_bytes(layer, shape, setup) for layer, number in shape.groups)
    vocab = -(-shape.vocab // PADDED_VOCAB) * PADDED_VOCAB / tensor
    plain = DTYPE_BYTES["bfloat16" if setup.dtype in SCALE_BYTES else setup.dtype]
    ends = (1 if shape.is_tied else 2) * vocab * shape.hidden * plain
    vision = shape.vision * plain / tensor
    adapters = 0.0
    if setup.max_loras and setup.lora_rank:
        adapters = setup.max_loras * shape.adapter_parameters(setup.lora_rank) * plain / tensor
    inputs = {
        "blocks": blocks,
        "embedding_and_head": ends,
        "vision": vision,
        "adapters": adapters,
        "dtype": setup.dtype,
        "tensor_parallel": tensor,
        "expert_parallel": setup.expert_parallel,
    }
    formula = "blocks + embedding_and_head + vision + adapters, each over the GPUs that split it"
    return estimate(f"{PREFIX}.weights", blocks + ends + vision + adapters, WEIGHTS, "B", formula, inputs)


def _layer_bytes(layer: Layer, shape: ModelShape, setup: EngineSetup) -> float:
    plain = DTYPE_BYTES["bfloat16" if setup.dtype in SCALE_BYTES else setup.dtype]
    total = plain * sum(vectors.count for vectors in layer.vectors)
    for matrix in layer.matrices:
        is_quantized = matrix.kind != WeightKind.ROUTER and (
            # 4-bit checkpoints of mixtures quantize the routed experts alone
            not (setup.dtype in ("fp4", "int4") and shape.is_mixture) or matrix.kind == WeightKind.EXPERT
        )
        each = stored_bytes(setup.dtype) if is_quantized else plain
        total += each * matrix.parameters * _share(matrix, layer, setup)
    return total


def _share(matrix: Matrix, layer: Layer, setup: EngineSetup) -> float:
    """Return the share of a matrix that a GPU holds."""
    tensor = setup.tensor_parallel
    if matrix.kind == WeightKind.EXPERT:
        return 1 / max(tensor, setup.expert_parallel)
    if matrix.is_replicated:
        return 1.0
    attention = layer.attention
    if attention is not None and matrix.last_name in ("k_proj", "v_proj"):
        return max(1 / tensor, 1 / attention.kv_heads)  # heads are repeated beyond their number
    return 1 / tensor


# -- KV cache --------------------------------------------------------------------------------------


def sequence_bytes(shape: ModelShape, setup: EngineSetup) -> SequenceBytes:
    """Return what a sequence occupies in the KV cache of one GPU."""
    each = DTYPE_BYTES[setup.kv_dtype]
    full = state = 0.0
    windows: dict[int, float] = {}
    for layer, number in shape.groups:
        attention = layer.attention
        if attention is not None and attention.latent_dim is not None:
            full += number * each * attention.kv_elements  # every GPU keeps the latent vectors of all heads
        elif attention is not None:
            heads = -(-attention.kv_heads // setup.tensor_parallel)
            found = number * each * heads * (attention.qk_dim + attention.v_dim)
            if attention.window is None:
                full += found
            else:
                windows[attention.window] = windows.get(attention.window, 0.0) + found
        if layer.state is not None:
            elements = layer.state.state_elements * STATE_BYTES + layer.state.conv_elements * each
            state += number * elements / setup.tensor_parallel
    return SequenceBytes(full, tuple(sorted(windows.items())), state, setup.block_size)


# -- activations -----------------------------------------------------------------------------------


def _activations(shape: ModelShape, setup: EngineSetup) -> Figure:
    tokens, tensor = setup.max_num_batched_tokens, setup.tensor_parallel
    block = max(_block_elements(layer, shape.hidden, tensor) for layer, _ in shape.groups)
    forward = 2 * tokens * block
    sampler = SAMPLER_BYTES * setup.max_num_seqs * shape.vocab
    return estimate(
        f"{PREFIX}.activations",
        max(forward, sampler),
        ACTIVATIONS,
        "B",
        "max(2 × batched tokens × elements of a block, bytes per logit × max_num_seqs × vocabulary)",
        {"batched_tokens": tokens, "elements": block, "forward": forward, "sampler": sampler},
        source="vLLM's profiling run: a forward of max_num_batched_tokens, then sampling max_num_seqs sequences",
    )


def _block_elements(layer: Layer, hidden: int, tensor: int) -> float:
    """Elements per token while a block runs: residual and input, and the widest products."""
    widest = 0.0
    routed = 0.0
    for matrix in layer.matrices:
        if not matrix.name.endswith("down_proj"):
            continue
        if matrix.kind == WeightKind.EXPERT:
            inner = matrix.ins / tensor
            routed = matrix.active * (max(2 * inner, matrix.outs) + inner)
        else:
            widest = max(widest, 3 * matrix.ins / tensor)
    return 2 * hidden + max(widest, routed)
