"""Forward time of a model's layers on one GPU, as the sum of its operations. Engines and trainer share it.

Matrices with the same input are one product, as vLLM and compilers fuse them: queries, keys and values; gate and up.
Tensor parallelism splits outputs of the first and inputs of the second matrix of a pair; heads of keys and values that
are fewer than GPUs are repeated.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from primerl_hpc.plan.predict.architectures.parts import Attention, Layer, Matrix, WeightKind
from primerl_hpc.plan.predict.layouts import DTYPE_BYTES
from primerl_hpc.plan.predict.shape import ModelShape
from primerl_hpc.plan.predict.timing.curves import Operations

SECOND_OF_PAIR = ("o_proj", "out_proj", "down_proj", "fc2_latent_proj")
"""Endings of matrices whose input is the output of an earlier matrix: tensor parallelism splits their inputs."""
ELEMENTWISE_SHARE = 0.6
"""Share of the memory bandwidth of norms, rotary embedding and activations; aiconfigurator assumes 0.8."""
STATE_SHARE = 0.6
"""Share of the memory bandwidth of linear-attention states. Judgment: no table was reduced for it."""

LATENT_SHARE = 0.6
"""Share of the peak of latent attention in decode; FlashMLA reports 660 TFLOP/s on an H800 (its README, 2025-04)."""


@dataclass(frozen=True)
class LayerSplit:
    """How layers are divided over GPUs, and their data types."""

    tensor: int = 1
    expert: int = 1
    """GPUs over which routed experts are distributed; 1: each expert is split by ``tensor``."""
    data: int = 1
    """Data-parallel ranks whose tokens meet in the experts of ``expert``."""
    dtype: str = "bfloat16"
    expert_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    tile: int = 1
    """Products whose sizes are not multiples of it stay in bfloat16."""


@dataclass(frozen=True)
class Product:
    """Matrices that are multiplied at once."""

    ins: int
    outs: int
    kind: WeightKind


@dataclass(frozen=True)
class LayerWork:
    """One distinct layer, divided."""

    layer: Layer
    split: LayerSplit
    hidden: int

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """Matrix products of one GPU, without routed experts."""
        groups: dict[tuple[str, WeightKind, int, bool], int] = defaultdict(int)
        for matrix in self.layer.matrices:
            if matrix.kind == WeightKind.EXPERT:
                continue
            is_second = matrix.last_name in SECOND_OF_PAIR
            ins, outs = self._divided(matrix, is_second)
            groups[(matrix.name.rpartition(".")[0], matrix.kind, ins, is_second)] += outs
        return tuple(Product(ins, outs, kind) for (_, kind, ins, _), outs in groups.items())

    def _divided(self, matrix: Matrix, is_second: bool) -> tuple[int, int]:
        tensor = self.split.tensor
        if tensor == 1 or matrix.is_replicated:
            return matrix.ins, matrix.outs
        if is_second:
            return -(-matrix.ins // tensor), matrix.outs
        if matrix.last_name in ("k_proj", "v_proj") and self.layer.attention is not None:
            heads = self.layer.attention.kv_heads
            return matrix.ins, matrix.outs // heads * -(-heads // tensor)
        return matrix.ins, -(-matrix.outs // tensor)

    @cached_property
    def experts(self) -> tuple[int, int, int, int] | None:
        """Routed experts: all, per token, their width on one GPU, and the width of their input. None: a dense layer."""
        found = [matrix for matrix in self.layer.matrices if matrix.kind == WeightKind.EXPERT]
        if not found:
            return None
        down = next(matrix for matrix in found if matrix.name.endswith("down_proj"))
        width = down.ins if self.split.expert > 1 else max(1, down.ins // self.split.tensor)
        # matrices without a gate have two thirds of the weights that `Operations.experts` counts
        gated = sum(matrix.weights for matrix in found) / (3 * down.copies * down.ins * down.outs)
        return down.copies, down.active, max(1, round(width * gated)), down.outs

    def matmul_s(self, operations: Operations, rows: float) -> float:
        """Return the time of all products without routed experts."""
        return sum(
            operations.gemm(rows, product.ins, product.outs, self._dtype(product))
            for product in self.products
        )

    def _dtype(self, product: Product) -> str:
        is_kept = product.kind == WeightKind.ROUTER or not self._fills_tiles(product.ins, product.outs)
        return "bfloat16" if is_kept else self.split.dtype

    def _fills_tiles(self, *sizes: int) -> bool:
        return all(size % self.split.tile == 0 for size in sizes)

    def rounded_elements(self, rows: float, expert_rows: float) -> float:
        """Return the elements of inputs, weights and outputs of the products that are not in bfloat16.

        ``rows``: tokens of the matrices; ``expert_rows``: tokens of one data-parallel rank in routed experts.
        """
        total = sum(
            rows * (product.ins + product.outs) + product.ins * product.outs
            for product in self.products
            if self._dtype(product) != "bfloat16"
        )
        if self.experts is not None and self._expert_dtype() != "bfloat16":
            number, chosen, width, hidden = self.experts
            share = self.split.data / self.split.expert if self.split.expert > 1 else 1.0
            total += expert_rows * chosen * share * (2 * hidden + 3 * width)
            total += 3 * number / self.split.expert * width * hidden
        return total

    def _expert_dtype(self) -> str:
        assert self.experts is not None
        return self.split.expert_dtype if self._fills_tiles(*self.experts[2:]) else "bfloat16"

    def experts_s(self, operations: Operations, rows: float) -> float:
        """Return the time of the routed experts of one GPU. ``rows``: tokens of one data-parallel rank."""
        if self.experts is None or rows <= 0:
            return 0.0
        number, chosen, width, hidden = self.experts
        tokens = rows * (self.split.data if self.split.expert > 1 else 1)
        held = number / self.split.expert
        hit = held * (1 - (1 - chosen / number) ** tokens)
        choices = tokens * chosen / self.split.expert
        return operations.experts(choices, hit, width, hidden, self._expert_dtype())

    def kv_bytes(self, context: float) -> float:
        """Return the bytes of keys and values that one GPU reads for a sequence of this length."""
        attention = self.layer.attention
        if attention is None:
            return 0.0
        own = cached_elements(attention, self.split.tensor) * seen(attention, context)
        return DTYPE_BYTES[self.split.kv_dtype] * (own + attention.index_dim * context)

    def state_bytes(self) -> float:
        """Return the bytes of the linear-attention state of a sequence on one GPU; states are float32."""
        state = self.layer.state
        return 0.0 if state is None else 4 * state.state_elements / self.split.tensor

    def elementwise_bytes(self, rows: float) -> float:
        """Return bytes of norms, residuals, rotary embedding and activations: 8 rows of the model's width (two norms
        that read and write hidden states and residual), and each product's output read and written once more."""
        wide = sum(product.outs for product in self.products if product.kind != WeightKind.ROUTER)
        if self.experts is not None:
            _, chosen, width, hidden = self.experts
            share = self.split.data / self.split.expert if self.split.expert > 1 else 1.0
            wide += chosen * share * (3 * width + hidden)
        return 2 * rows * (8 * self.hidden + 2 * wide)

    @property
    def kernels(self) -> int:
        """Number of small kernels: two norms, rotary embedding, cache write, activation; routing and sums of experts.
        Compilers fuse the quantization of activations with norms and activations."""
        return 5 if self.experts is None else 9


def cached_elements(attention: Attention, tensor: int) -> int:
    """Return the elements of keys and values per token on each GPU; latent attention keeps all of them on each."""
    if attention.latent_dim is not None:
        return attention.latent_dim
    return -(-attention.kv_heads // tensor) * (attention.qk_dim + attention.v_dim)


def seen(attention: Attention, context: float) -> float:
    """Return the number of keys that a query at this position reads."""
    limits = [limit for limit in (attention.window, attention.index_topk) if limit is not None]
    return min([context, *limits])


def layers_of(shape: ModelShape, split: LayerSplit) -> list[tuple[LayerWork, int]]:
    """Return the distinct layers of a model, divided, with their numbers."""
    return [(LayerWork(layer, split, shape.hidden), number) for layer, number in shape.groups]


def decode_attention_s(operations: Operations, work: LayerWork, batch: float, context: float) -> float:
    """Return the time of a layer's attention in a decode step. Latent attention multiplies all heads with the same
    cached vectors, so that its FLOP count, too."""
    time = operations.decode_attention(batch, work.kv_bytes(context), work.split.kv_dtype)
    attention = work.layer.attention
    if attention is None or attention.latent_dim is None:
        return time
    heads = -(-attention.heads // work.split.tensor)
    # QKᵀ over the latent and rotary elements, PV over the latent elements, which are all but the rotary ones
    flops = 2 * batch * seen(attention, context) * heads * 2 * attention.latent_dim
    return max(time, flops / (operations.gpu.peak_flops["bfloat16"] * LATENT_SHARE))


def pair_flops(attention: Attention, tensor: int) -> float:
    """Return the forward FLOP of one query and one visible key on one GPU: QKᵀ and PV."""
    return 2 * -(-attention.heads // tensor) * (attention.qk_dim + attention.v_dim)
