"""FLOP of forward and backward by the lengths of samples: the only place where they are counted.

    flops = training_flops(shape)                     # or with adapters: training_flops(shape, lora_rank=16)
    flops.count([1200, 800], predicted=1500)          # a row of two samples, 1500 tokens with a loss
    forward_flops(shape).count([4096], predicted=1)   # a prompt

The trainer's MFU uses `Flops` with the matrices of the model that it has loaded (`trainer.perf.FlopCounter`); the plan
uses the shape from config.json. Recomputation by activation checkpointing is not counted: it is no model FLOP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from primerl_hpc.plan.predict.architectures.parts import Attention, Layer
from primerl_hpc.plan.predict.shape import ModelShape

FORWARD = 2
"""FLOP per weight and token of a matrix product: a multiplication and an addition."""
TRAINED = 3 * FORWARD
"""The same with backward: the product itself, the gradient of its input, and the gradient of the weight."""
FROZEN = 2 * FORWARD
"""With backward, for a weight that has no gradient."""


@dataclass(frozen=True)
class AttentionFlops:
    """Layers of softmax attention with equal cost per pair of a query and a visible key."""

    per_pair: float
    """FLOP per layer and pair: QKᵀ and PV take 2·heads·(d_qk + d_v) in forward, three times that with backward."""
    windows: Mapping[int | None, int]
    """Number of layers with each window (None: all earlier keys)."""

    def count(self, lengths: list[float]) -> float:
        pairs = sum(number * visible_pairs(lengths, window) for window, number in self.windows.items())
        return self.per_pair * pairs


@dataclass(frozen=True)
class Flops:
    """FLOP of one pass: per token of the blocks, per predicted token of the head, and attention within samples."""

    blocks: float
    head: float
    attention: tuple[AttentionFlops, ...]

    def count(self, lengths: Iterable[float], predicted: int, tokens: int | None = None) -> float:
        """Return the FLOP of samples of these lengths, of which ``predicted`` tokens pass the head.

        ``tokens``: the row's tokens, padding included; None: the sum of the lengths.
        """
        lengths = [float(length) for length in lengths]
        number = sum(lengths) if tokens is None else tokens
        total = self.blocks * number + self.head * predicted
        for attention in self.attention:
            total += attention.count(lengths)
        return total


def visible_pairs(lengths: Iterable[float], window: int | None) -> float:
    """Return the number of pairs of a query and a visible key in samples of these lengths.

    With causal attention there are n²/2 pairs, and within a window of w keys w·n − w²/2. A query's own key is half a
    pair.
    """
    total = 0.0
    for length in lengths:
        width = length if window is None else min(length, window)
        total += width * length - width**2 / 2
    return total


def training_flops(
    shape: ModelShape,
    *,
    lora_rank: int | None = None,
    lora_targets: tuple[str, ...] | Literal["auto"] = "auto",
) -> Flops:
    """Return the FLOP of forward and backward of the text model; a vision tower is not counted."""
    weight = TRAINED if lora_rank is None else FROZEN
    blocks = float(weight * shape.block_matmul_weights) + 3 * _state_flops(shape)
    if lora_rank is not None:
        blocks += TRAINED * shape.active_adapter_parameters(lora_rank, lora_targets)
    return Flops(blocks, float(weight * shape.head_weights), _attention(shape, passes=3))


def forward_flops(shape: ModelShape) -> Flops:
    """Return the FLOP of forward alone: a prompt, log-probabilities of a frozen model, or a decoded token."""
    blocks = float(FORWARD * shape.block_matmul_weights) + _state_flops(shape)
    return Flops(blocks, float(FORWARD * shape.head_weights), _attention(shape, passes=1))


def decode_flops(shape: ModelShape, context: float) -> float:
    """Return the forward FLOP of one further token after ``context`` tokens."""
    flops = forward_flops(shape)
    keys = sum(
        attention.per_pair * number * (context if window is None else min(context, window))
        for attention in flops.attention
        for window, number in attention.windows.items()
    )
    return flops.blocks + flops.head + keys


def _attention(shape: ModelShape, passes: int) -> tuple[AttentionFlops, ...]:
    """Return the terms of all layers. ``passes``: 1 for forward, 3 with backward."""
    found: dict[float, dict[int | None, int]] = {}
    for layer, number in shape.groups:
        if layer.attention is None:
            continue
        for per_pair, window in _terms(layer.attention, passes):
            windows = found.setdefault(per_pair, {})
            windows[window] = windows.get(window, 0) + number
    return tuple(AttentionFlops(per_pair, windows) for per_pair, windows in found.items())


def _terms(attention: Attention, passes: int) -> list[tuple[float, int | None]]:
    """Return FLOP per pair and the window of a layer: of attention, and of the indexer that selects its keys."""
    own = float(passes * FORWARD * attention.heads * (attention.qk_dim + attention.v_dim))
    terms: list[tuple[float, int | None]] = [(own, attention.index_topk or attention.window)]
    if attention.index_heads:
        # every earlier key is scored, without a gradient
        terms.append((float(FORWARD * attention.index_heads * attention.index_dim), None))
    return terms


def _state_flops(shape: ModelShape) -> float:
    """Return forward FLOP per token of linear attention, by its recurrence; chunked kernels do more work."""
    return float(sum(number * layer_state_flops(layer) for layer, number in shape.groups))


def layer_state_flops(layer: Layer) -> int:
    """Return forward FLOP per token of a layer's recurrent state and convolution; 0 for softmax attention."""
    state = layer.state
    if state is None:
        return 0
    products = FORWARD * state.products * state.state_elements
    return products + FORWARD * state.conv_channels * state.conv_kernel
