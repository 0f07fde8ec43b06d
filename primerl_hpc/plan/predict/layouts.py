"""Inputs of the formulas: how a trainer and its engines are laid out. Plain numbers, without recipe or profile.

The same types describe our own runs and the published measurements that the formulas are validated against.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float32", "bfloat16", "float16", "fp8", "fp4", "int8", "int4"]

DTYPE_BYTES: dict[str, float] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "int8": 1,
    "int4": 0.5,
    "fp4": 0.5,
}
"""Bytes of an element, without the scales of quantized formats."""


FORWARD_TOKENS = 16_384
"""Short rows are stacked up to about this number of tokens per forward on a GPU (`trainer.batch.FORWARD_TOKENS`)."""


@dataclass(frozen=True)
class TrainerSetup:
    """The trainer's ranks and what each of them keeps in memory. Names follow ``layout.trainer`` and ``trainer``."""

    ranks: int
    """All GPUs of the trainer: replicate × shard × tensor_parallel."""
    ranks_per_node: int
    seq_len: int
    """Tokens of a row (a micro-batch has `micro_rows` of them), before context parallelism splits it."""
    shard: int
    """Ranks that share one copy of the model (FSDP), including those of context_parallel."""
    replicate: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    tensor_parallel: int = 1
    micro_rows: int = 1
    micro_batches: int = 1
    """Forward and backward passes of a rank per step."""
    checkpointing: Literal["none", "selective", "full"] = "full"
    checkpointed_modules: tuple[str, ...] = ()
    """Modules that ``selective`` recomputes, as named in ``trainer.activation_checkpointing``."""
    every: int = 1
    """Every n-th block is checkpointed."""
    activation_offload: bool = False
    optimizer_offload: bool = False
    cpu_offload: bool = False
    optimizer: Literal["adamw", "sgd", "muon", "sign_sgd"] = "adamw"
    param_dtype: Dtype = "bfloat16"
    """Type of weights in forward and backward; master weights are float32."""
    fp8: Literal["none", "blockwise", "mxfp8"] = "none"
    """Format of the products in the decoder's blocks."""
    float32_head: bool = False
    """The head's weight and its gradient are float32 in forward and backward."""
    reduce_dtype: Dtype = "float32"
    reshard_after_forward: bool | Literal["auto"] = "auto"
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] | Literal["auto"] = "auto"
    loss: Literal["rl", "sft"] = "rl"
    head_chunk_tokens: int | Literal["auto"] = "auto"
    is_compiled: bool = False
    saves_copy_of: Literal["none", "weights", "all"] = "none"
    """State that is copied to host memory and written while training continues, see ``checkpoint``."""
    trains_vision: bool = False

    @property
    def row_tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return -(-self.seq_len // self.context_parallel) * self.micro_rows

    @property
    def data_parallel(self) -> int:
        """Groups of ranks that process different rows."""
        return self.ranks // self.context_parallel // self.tensor_parallel


@dataclass(frozen=True)
class EngineSetup:
    """One engine replica. Names follow vLLM's arguments."""

    gpus: int
    """All GPUs of the replica: tensor_parallel × data_parallel."""
    tensor_parallel: int
    max_model_len: int
    data_parallel: int = 1
    expert_parallel: int = 1
    """GPUs over which experts are distributed; 1: experts are split as by tensor parallelism."""
    dtype: Dtype = "bfloat16"
    """Type of the weights."""
    kv_dtype: Dtype = "bfloat16"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    """Fixed size of the KV cache of a GPU; None: what the other parts leave."""
    block_size: int = 16
    enforce_eager: bool = False
    max_loras: int = 0
    lora_rank: int = 0


@dataclass(frozen=True)
class TrainerSoftware:
    """Differences between trainers with the same layout. The default describes this package's trainer."""

    name: str = "primerl-hpc"
    frozen_bytes: float | None = None
    """Bytes per frozen parameter; None: those of ``param_dtype``."""
    adapters: int = 1
    """LoRA adapters in memory at a time."""
    has_chunked_head: bool = True
    """Logits of a chunk of tokens at a time; otherwise those of all tokens."""
    chunk_bytes: float = 8
    """Bytes per logit of a chunk in forward: float32 logits and log-softmax (`trainer.model.head`)."""
    chunk_backward_bytes: float = 6
    """Bytes per logit of a chunk in backward: float32 probabilities, and the gradient in bf16."""
    chunk_gradient_bytes: float = 4
    """Bytes per element of the head while chunks run backward: its float32 gradient."""
    logit_bytes: float = 14
    """Bytes per logit without chunks: bf16 logits, float32 log-softmax, and the gradients of its output and input."""
    dense_copies: float = 1.0
    """Working set of a block, without routed experts, relative to `architectures.activations`."""
    frozen_dense_copies: float = 1.0
    """The same where only adapters are trained."""
    expert_copies: float = 1.0
    """Working set of routed experts, relative to `architectures.activations`."""
    keeps_products: bool = False
    """``selective`` recomputes single operations, not modules: see `architectures.activations.kept_products`."""
    gathered_layers: float = 2.0
    """Layers whose weights are gathered at a time: the current and the prefetched one."""
    head_gradient_bytes: float = 6
    """Bytes per element of the head after the last chunk: its float32 gradient, and the same in bf16."""
    block_gradient_bytes: float = 2
    """Bytes per element of the head while blocks run backward: its gradient in bf16, which is reduced at the end."""
    collective_bytes: float = 0.0
    """Buffers of collectives in torch's allocator that are in no other figure, with more than one rank."""
    reserve_factor: float = 1.05
    """Memory that the allocator reserves, relative to what is allocated, for activations and logits."""
    source: str = "trainer of this package: trainer/model, trainer/parallel/fsdp.py, trainer/optim"
