"""Activations of a block: elements per token that backward needs, and the peak while a block is recomputed.

The coefficients are those of transformers' eager blocks with fused attention, counted by following each storage of a
block on fake tensors (``tests/unit/plan/predict/test_activations.py`` counts them again). They are exact for
grouped-query attention with dense MLPs and for fused experts; those of latent attention were counted in a trace of
DeepSeek-V3 (``tools/bench/trainer_trace.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.plan.predict.architectures.parts import Layer, WeightKind


@dataclass(frozen=True)
class BlockElements:
    """Elements per token of one block, in the type of forward and backward."""

    mixer: float
    mlp: float
    experts: float
    """Routed experts: grows with the experts per token."""
    hidden: float
    """Residual stream and norms."""

    @property
    def dense(self) -> float:
        return self.mixer + self.mlp + self.hidden


def kept_elements(layer: Layer, hidden: int, *, is_trained: bool = False) -> BlockElements:
    """Return what forward keeps for backward without recomputation. Raises ConfigError for linear attention.

    ``is_trained``: the weights have gradients, which need the inputs of norms and products.
    """
    dims = _dims(layer)
    if not is_trained:
        return BlockElements(dims.projected, dims.mlp, dims.routed_hidden + 3 * dims.routed_width, 5 * hidden)
    attention = layer.attention
    has_copies = attention is not None and attention.has_qk_norm
    mixer = dims.projected * (5 / 4 if has_copies else 1)
    routed = 2 * dims.routed_hidden + 4 * dims.routed_width
    return BlockElements(mixer, dims.mlp * 4 / 3, routed, 9 * hidden)


def working_elements(layer: Layer, hidden: int) -> BlockElements:
    """Return the peak above a block's input while it is recomputed and run backward: kept activations and the
    gradients of the feed-forward part. Raises ConfigError for linear attention.
    """
    dims = _dims(layer)
    routed = 4 * dims.routed_hidden + 3 * dims.routed_width
    return BlockElements(dims.projected, 2 * dims.mlp, routed, (6 if routed else 4) * hidden)


def recomputed_elements(
    layer: Layer, hidden: int, *, is_trained: bool, rows: float | None = None
) -> BlockElements:
    """Return the peak above a block's input in the trainer's own step, without compilation: as `working_elements`, with
    the float32 copies that trained norms keep, and the gradients of the block's output and residual stream.

    ``rows``: received for each token with expert parallelism, whose peak is the sum of the experts' output in float32,
    or its gradient.
    Raises ConfigError for linear attention.
    """
    dims, kept = _dims(layer), kept_elements(layer, hidden, is_trained=is_trained)
    if rows is not None and dims.routed_hidden:
        forward = 4 * rows * hidden + 2 * dims.routed_hidden
        backward = 2 * rows * hidden + 3 * dims.routed_hidden
        routed = max(forward, backward) + 4 * dims.routed_width
    else:
        copies = 1 if is_trained else 0
        routed = (4 + copies) * dims.routed_hidden + (3 + copies) * dims.routed_width
    return BlockElements(kept.mixer, 2 * dims.mlp, routed, kept.hidden + 2 * hidden)


def kept_products(layer: Layer, hidden: int) -> float:
    """Return what selective recomputation by operation keeps (torchtitan): the block's input, the output of attention
    and of every second matrix product.
    """
    products = sum(matrix.active * matrix.outs for matrix in layer.matrices) / 2
    attention = layer.attention
    return hidden + products + (attention.heads * attention.v_dim if attention else 0)


@dataclass(frozen=True)
class _Dims:
    projected: float
    """Queries, keys and values with their rotated and normed copies."""
    mlp: float
    """Outputs of gate, up and activation of dense MLPs and shared experts."""
    routed_hidden: float
    """Experts per token × width of the model: permuted inputs of routed experts."""
    routed_width: float
    """Experts per token × width of an expert."""


def _dims(layer: Layer) -> _Dims:
    if layer.state is not None:
        raise ConfigError("the memory of layers with linear attention in the trainer is not predicted")
    projected = 0.0
    attention = layer.attention
    if attention and attention.latent_dim:
        # queries, keys, and values and outputs that are padded to their width; outputs once more; latent vectors
        padded = 4 * max(attention.qk_dim, attention.v_dim)
        projected = attention.heads * (padded + attention.v_dim) + 4 * attention.latent_dim
    elif attention:
        copies = 2 if attention.has_qk_norm else 1
        keys = attention.kv_heads * (attention.qk_dim + attention.v_dim) / 2
        projected = copies * 2 * (attention.heads * attention.qk_dim + keys)
    mlp = routed_hidden = routed_width = 0.0
    for matrix in layer.matrices:
        if not matrix.name.endswith("down_proj"):
            continue
        if matrix.kind == WeightKind.EXPERT:
            routed_hidden, routed_width = matrix.active * matrix.outs, matrix.active * matrix.ins
        else:
            has_gate = any(
                "gate_proj" in other.name or "gate_up_proj" in other.name for other in layer.matrices
            )
            mlp += (3 if has_gate else 2) * matrix.ins
    return _Dims(projected, mlp, routed_hidden, routed_width)
