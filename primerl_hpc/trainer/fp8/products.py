"""Products of linear layers and of experts in FP8, with both gradients.

    y  = Q(x) Q(W)ᵀ       tiles along the inputs
    gx = Q(g) Q(W)        tiles along the outputs
    gW = Q(gᵀ) Q(xᵀ)ᵀ     tiles along the tokens

Q rounds to FP8 with scales along the dim that the product sums over. On GPUs torchao multiplies FP8 values; elsewhere
each Q is followed by its inverse, and the product is summed in float32. Both round results to the type of x.

`linear` and `grouped_linear` compute plain products for modules without a ``fp8`` attribute; `layers.apply_fp8` sets
it.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primerl_hpc.trainer.fp8.formats import Fp8Format, quantize_blocks, quantize_tiles


def format_of(module: object) -> Fp8Format | None:
    """Return the format of a module's products; None: the type of its weights."""
    return getattr(module, "fp8", None)


def linear(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b in the format of ``module``. x [..., K], weight [N, K] → [..., N]."""
    form = format_of(module)
    if form is None:
        return F.linear(x, weight, bias)
    out = multiply(x.flatten(0, -2), weight, form).view(*x.shape[:-1], len(weight))
    return out if bias is None else out + bias


def multiply(x: Tensor, weight: Tensor, form: Fp8Format) -> Tensor:
    """Return x Wᵀ. x [M, K], weight [N, K] → [M, N]. Rows of zeros fill the last tile of tokens."""
    num_rows = len(x)
    x = F.pad(x, (0, 0, 0, -num_rows % form.tile))
    if x.is_cuda:
        from primerl_hpc.trainer.fp8 import gpu

        return gpu.multiply(x, weight, form)[:num_rows]
    return EmulatedProduct.apply(x, weight, form)[:num_rows]


def grouped_multiply(x: Tensor, weight: Tensor, ends: Tensor, form: Fp8Format) -> Tensor:
    """Return x_e W_eᵀ of each expert e. x [S, K] in order of experts, weight [E, N, K], ends [E] int32 → [S, N]."""
    if x.is_cuda:
        from primerl_hpc.trainer.fp8 import gpu

        return gpu.grouped_multiply(x, weight, ends, form)
    sizes = [end - start for start, end in pairwise([0, *ends.tolist()])]
    parts = zip(x.split(sizes), weight.unbind(), strict=True)
    products = [multiply(rows, matrix, form) for rows, matrix in parts if len(rows)]
    return (
        torch.cat(products) if products else F.linear(x, weight[0])
    )  # no rows, but a gradient for the weight


class EmulatedProduct(torch.autograd.Function):
    """x Wᵀ with FP8 values that are multiplied in float32. x [M, K], weight [N, K], M a multiple of the tile."""

    @staticmethod
    def forward(ctx, x, weight, form):
        ctx.save_for_backward(x, weight)
        ctx.form = form
        return product(round_tiles(x, form), round_weight(weight, form), x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x, weight), form = ctx.saved_tensors, ctx.form
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = product(round_tiles(grad, form), round_weight(weight.T, form), x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = product(round_tiles(grad.T, form), round_tiles(x.T, form), weight.dtype)
        return grad_x, grad_weight, None


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return (left @ right.T).to(dtype)


def round_tiles(x: Tensor, form: Fp8Format) -> Tensor:
    """Return x [M, K] rounded to FP8 by tiles along K, in float32."""
    return quantize_tiles(x, form).dequantize()


def round_weight(weight: Tensor, form: Fp8Format) -> Tensor:
    """Return weight [N, K] rounded to FP8 by blocks, or by tiles along K, in float32."""
    return (quantize_blocks if form.has_blocks else quantize_tiles)(weight, form).dequantize()
