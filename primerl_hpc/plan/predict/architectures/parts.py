"""Parts of a model: matrices, vectors and what a layer keeps per token of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from primerl_hpc.recipe.schema.training import is_target


class WeightKind(StrEnum):
    """Use of a parameter. Layouts split and optimizers treat them differently."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    LINEAR_ATTENTION = "linear_attention"
    MLP = "mlp"
    EXPERT = "expert"
    SHARED_EXPERT = "shared_expert"
    ROUTER = "router"
    NORM = "norm"
    HEAD = "head"
    VISION = "vision"


@dataclass(frozen=True)
class Matrix:
    """A linear layer, or the same matrix of all routed experts."""

    name: str
    """Path in its block, e.g. ``self_attn.q_proj``."""
    kind: WeightKind
    ins: int
    outs: int
    has_bias: bool = False
    copies: int = 1
    """Routed experts; 1 for all others."""
    active: int = 1
    """Copies that process a token."""
    adapter: str | None = None
    """Path that ``lora.target_modules`` matches; None if no adapter can be attached."""

    @property
    def weights(self) -> int:
        """Elements of the matrices alone."""
        return self.copies * self.ins * self.outs

    @property
    def parameters(self) -> int:
        return self.copies * (self.ins + self.has_bias) * self.outs

    @property
    def active_parameters(self) -> int:
        return self.active * (self.ins + self.has_bias) * self.outs

    @property
    def last_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def is_replicated(self) -> bool:
        """True if tensor parallelism does not split the matrix."""
        return self.kind == WeightKind.ROUTER or self.last_name in REPLICATED

    def is_adapted(self, targets: tuple[str, ...] | Literal["auto"]) -> bool:
        """True if LoRA adapts the matrix. ``targets``: as ``lora.target_modules``, suffixes of module paths."""
        if targets == "auto":
            return self.adapter is not None
        path = self.name if self.adapter is None else self.adapter
        is_named = any(is_target(path, target) for target in targets)
        return is_named and self.kind != WeightKind.ROUTER


REPLICATED = (
    "q_a_proj",
    "kv_a_proj_with_mqa",
    "shared_expert_gate",
    "weights_proj",
    "wk",
    "wq_b",
    "fc1_latent_proj",
)
"""Last names of matrices that each GPU of a tensor-parallel group of an engine holds and computes completely."""


@dataclass(frozen=True)
class Vectors:
    """Parameters that are not multiplied as matrices: norms, convolutions, sinks, decays."""

    kind: WeightKind
    count: int


@dataclass(frozen=True)
class Attention:
    """Softmax attention of a layer."""

    heads: int
    kv_heads: int
    """Heads of keys and values before they are repeated; 1 for latent attention."""
    qk_dim: int
    v_dim: int
    window: int | None = None
    """Keys that a query sees; None: all earlier ones."""
    latent_dim: int | None = None
    """Elements that multi-head latent attention (DeepSeek) caches per token, for all heads together."""
    index_dim: int = 0
    """Elements that a sparse-attention indexer caches per token."""
    index_heads: int = 0
    index_topk: int | None = None
    """Keys that the indexer selects for each query; None without one."""
    has_qk_norm: bool = False

    @property
    def kv_elements(self) -> int:
        """Elements that the KV cache holds per token."""
        own = self.kv_heads * (self.qk_dim + self.v_dim) if self.latent_dim is None else self.latent_dim
        return own + self.index_dim


@dataclass(frozen=True)
class LinearState:
    """State of linear attention (gated delta rule) or a state-space mixer (Mamba 2), of constant size per sequence."""

    heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_kernel: int

    @property
    def state_elements(self) -> int:
        return self.heads * self.key_dim * self.value_dim

    @property
    def conv_elements(self) -> int:
        return self.conv_channels * (self.conv_kernel - 1)


@dataclass(frozen=True)
class Layer:
    """One block: a mixer over the sequence, a feed-forward part, or both."""

    matrices: tuple[Matrix, ...]
    vectors: tuple[Vectors, ...]
    attention: Attention | None = None
    state: LinearState | None = None

    @property
    def parameters(self) -> int:
        return sum(matrix.parameters for matrix in self.matrices) + sum(v.count for v in self.vectors)

    @property
    def active_parameters(self) -> int:
        return sum(matrix.active_parameters for matrix in self.matrices) + sum(v.count for v in self.vectors)

    @property
    def expert_parameters(self) -> int:
        return sum(matrix.parameters for matrix in self.matrices if matrix.kind == WeightKind.EXPERT)


@dataclass(frozen=True)
class Mixer:
    """Contribution of a mixer or a feed-forward part to its block."""

    matrices: tuple[Matrix, ...] = ()
    vectors: tuple[Vectors, ...] = ()
    attention: Attention | None = None
    state: LinearState | None = None


Bias = bool | Literal["attention_bias", "qkv_bias", "mlp_bias", "attention_out_bias"]
"""True, False, or the key of config.json that decides."""
