"""FLOP of forward and backward by the lengths of samples: the only place where they are counted.

    Flops(blocks, head, attention).count([1200, 800], predicted=1500)     # two samples, 1500 tokens with a loss

The trainer's MFU uses `Flops` with the matrices of the model that it has loaded (`trainer.perf.FlopCounter`), the plan
counts the pairs of attention. Recomputation by activation checkpointing is not counted: it is no model FLOP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
