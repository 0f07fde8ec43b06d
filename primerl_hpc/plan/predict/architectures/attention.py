"""Mixers over the sequence: grouped-query, latent and linear attention, and Mamba 2."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from primerl_hpc.plan.predict.architectures.config_reader import ConfigReader
from primerl_hpc.plan.predict.architectures.parts import (
    Attention,
    Bias,
    LinearState,
    Matrix,
    Mixer,
    Vectors,
    WeightKind,
)

ABSORBED = "kv_b_proj"
"""Projection that ``lora.target_modules: auto`` leaves out (`recipe.schema.training.ABSORBED`)."""


@dataclass(frozen=True)
class GroupedQuery:
    """Grouped-query attention and how families differ in it."""

    qkv_bias: Bias = False
    out_bias: Bias = False
    qk_norm: Literal["none", "head", "all_heads", "use_qk_norm"] = "none"
    """Norms of queries and keys: of each head, of all heads together, or as the key ``use_qk_norm`` decides."""
    has_output_gate: bool = False
    """Queries are projected together with a gate of the same width (Qwen3-Next)."""
    has_sinks: bool = False
    is_fused: bool = False
    """Queries, keys and values are one matrix (Phi-3)."""
    module: str = "self_attn"

    def __call__(self, reader: ConfigReader, window: int | None) -> Mixer:
        hidden, heads, kv_heads, width = reader.hidden, reader.heads, reader.kv_heads, reader.head_dim
        bias, out_bias = bias_of(reader, self.qkv_bias), bias_of(reader, self.out_bias)
        query = heads * width * (2 if self.has_output_gate else 1)
        outs = {"q_proj": query, "k_proj": kv_heads * width, "v_proj": kv_heads * width}
        if self.is_fused:
            outs = {"qkv_proj": sum(outs.values())}
        matrices = [
            linear(f"{self.module}.{name}", WeightKind.ATTENTION, hidden, out, bias)
            for name, out in outs.items()
        ]
        matrices.append(
            linear(f"{self.module}.o_proj", WeightKind.ATTENTION, heads * width, hidden, out_bias)
        )
        vectors = []
        norm = self.qk_norm
        if norm == "use_qk_norm":
            norm = "head" if reader.flag("use_qk_norm", default=False) else "none"
        if norm != "none":
            vectors.append(
                Vectors(WeightKind.NORM, 2 * width if norm == "head" else (heads + kv_heads) * width)
            )
        if self.has_sinks:
            vectors.append(Vectors(WeightKind.ATTENTION, heads))
        attention = Attention(heads, kv_heads, width, width, window, has_qk_norm=norm != "none")
        return Mixer(tuple(matrices), tuple(vectors), attention)


def latent(reader: ConfigReader, window: int | None = None) -> Mixer:
    """Return multi-head latent attention (DeepSeek V2, V3, Kimi K2)."""
    hidden, heads = reader.hidden, reader.heads
    rank, rope = reader.size("kv_lora_rank"), reader.size("qk_rope_head_dim")
    nope, value = reader.size("qk_nope_head_dim"), reader.size("v_head_dim")
    bias = reader.flag("attention_bias", default=False)
    query_rank = reader.optional_size("q_lora_rank")
    norms = rank
    if query_rank is None:
        matrices = [linear("self_attn.q_proj", WeightKind.ATTENTION, hidden, heads * (nope + rope))]
    else:
        matrices = [
            linear("self_attn.q_a_proj", WeightKind.ATTENTION, hidden, query_rank, bias),
            linear("self_attn.q_b_proj", WeightKind.ATTENTION, query_rank, heads * (nope + rope)),
        ]
        norms += query_rank
    matrices += [
        linear("self_attn.kv_a_proj_with_mqa", WeightKind.ATTENTION, hidden, rank + rope, bias),
        linear("self_attn.kv_b_proj", WeightKind.ATTENTION, rank, heads * (nope + value)),
        linear("self_attn.o_proj", WeightKind.ATTENTION, heads * value, hidden, bias),
    ]
    attention = Attention(heads, 1, nope + rope, value, window, rank + rope)
    return Mixer(tuple(matrices), (Vectors(WeightKind.NORM, norms),), attention)


def sparse_latent(reader: ConfigReader, *, has_indexer: bool) -> Mixer:
    """Return latent attention to the ``index_topk`` keys that an indexer selects (DeepSeek V3.2, GLM-5).

    ``has_indexer``: False for a layer that uses the selection of an earlier layer.
    """
    dense = latent(reader)
    assert dense.attention is not None
    topk = reader.size("index_topk")
    if not has_indexer:
        return replace(dense, attention=replace(dense.attention, index_topk=topk))
    width, heads = reader.size("index_head_dim"), reader.size("index_n_heads")
    indexer = (
        linear("self_attn.indexer.wq_b", WeightKind.ATTENTION, reader.size("q_lora_rank"), heads * width),
        linear("self_attn.indexer.wk", WeightKind.ATTENTION, reader.hidden, width),
        linear("self_attn.indexer.weights_proj", WeightKind.ATTENTION, reader.hidden, heads),
    )
    norm = Vectors(WeightKind.NORM, 2 * width)  # LayerNorm with bias
    attention = replace(dense.attention, index_dim=width, index_heads=heads, index_topk=topk)
    return Mixer((*dense.matrices, *indexer), (*dense.vectors, norm), attention)


def delta_net(reader: ConfigReader, *, is_fused: bool) -> Mixer:
    """Return gated delta-rule attention: Qwen3-Next (projections in two matrices) or Qwen3.5 (in four)."""
    hidden = reader.hidden
    key_heads, value_heads = reader.size("linear_num_key_heads"), reader.size("linear_num_value_heads")
    key_dim, value_dim = reader.size("linear_key_head_dim"), reader.size("linear_value_head_dim")
    kernel = reader.size("linear_conv_kernel_dim")
    keys, values = key_heads * key_dim, value_heads * value_dim
    if is_fused:
        outs = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * value_heads}
    else:
        outs = {
            "in_proj_qkv": 2 * keys + values,
            "in_proj_z": values,
            "in_proj_b": value_heads,
            "in_proj_a": value_heads,
        }
    matrices = [
        linear(f"linear_attn.{name}", WeightKind.LINEAR_ATTENTION, hidden, out) for name, out in outs.items()
    ]
    matrices.append(linear("linear_attn.out_proj", WeightKind.LINEAR_ATTENTION, values, hidden))
    channels = 2 * keys + values
    vectors = (
        Vectors(
            WeightKind.LINEAR_ATTENTION, channels * kernel + 2 * value_heads
        ),  # convolution, dt_bias, A_log
        Vectors(WeightKind.NORM, value_dim),
    )
    return Mixer(
        tuple(matrices), vectors, state=LinearState(value_heads, key_dim, value_dim, channels, kernel)
    )


def mamba2(reader: ConfigReader) -> Mixer:
    """Return the Mamba-2 mixer of Nemotron-H."""
    hidden, heads, width = reader.hidden, reader.size("mamba_num_heads"), reader.size("mamba_head_dim")
    state, groups = reader.size("ssm_state_size"), reader.size("mamba_n_groups", "n_groups")
    kernel = reader.size("mamba_d_conv", "conv_kernel")
    bias = reader.flag("use_bias", default=False)
    conv_bias = reader.flag("mamba_conv_bias", default=reader.flag("use_conv_bias", default=True))
    inner = heads * width
    channels = inner + 2 * groups * state
    matrices = (
        linear("mixer.in_proj", WeightKind.LINEAR_ATTENTION, hidden, inner + channels + heads, bias),
        linear("mixer.out_proj", WeightKind.LINEAR_ATTENTION, inner, hidden, bias),
    )
    vectors = (
        Vectors(
            WeightKind.LINEAR_ATTENTION, channels * (kernel + conv_bias) + 3 * heads
        ),  # dt_bias, A_log, D
        Vectors(WeightKind.NORM, inner),
    )
    return Mixer(matrices, vectors, state=LinearState(heads, state, width, channels, kernel))


def linear(name: str, kind: WeightKind, ins: int, outs: int, has_bias: bool = False) -> Matrix:
    """Return a linear layer to which an adapter can be attached."""
    can_adapt = outs > 1 and not name.endswith(ABSORBED)
    return Matrix(name, kind, ins, outs, has_bias, adapter=name if can_adapt else None)


def bias_of(reader: ConfigReader, bias: Bias) -> bool:
    return bias if isinstance(bias, bool) else reader.flag(bias, default=bias == "qkv_bias")
