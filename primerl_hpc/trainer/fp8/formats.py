"""FP8 values and scales of a matrix, as torchao computes them on GPUs.

    blockwise   e4m3 values; float32 scales of tiles of 1 × 128 (activations, gradients) and blocks of 128 × 128
                (weights), as in DeepSeek-V3 (arXiv 2412.19437, section 3.3)
    mxfp8       e4m3 values; scales that are powers of two (e8m0), of tiles of 1 × 32 in every matrix (OCP Microscaling
                Formats, version 1.0), rounded up so that no value is clipped

    quantize_tiles(x, BLOCKWISE).dequantize()       # x [M, K] rounded to FP8, in float32

A tile with a NaN or an infinity becomes NaN, so that its step is skipped as without FP8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
MAX = torch.finfo(E4M3).max  # 448
SMALLEST_AMAX = 1e-12
"""Tiles whose largest magnitude is below this are quantized as if it were this: a scale is never infinite."""
MIN_EXPONENT, MAX_EXPONENT = -127, 127  # of e8m0


@dataclass(frozen=True)
class Fp8Format:
    """One value of ``trainer.fp8``."""

    name: str
    tile: int
    """Values of a row that share a scale. Rows and columns of the matrices must be multiples of it."""
    has_blocks: bool
    """A scale of a weight is that of ``tile`` rows too."""
    is_power_of_two: bool
    """Scales are powers of two."""


BLOCKWISE = Fp8Format("blockwise", 128, has_blocks=True, is_power_of_two=False)
MXFP8 = Fp8Format("mxfp8", 32, has_blocks=False, is_power_of_two=True)
FORMATS = {found.name: found for found in (BLOCKWISE, MXFP8)}


@dataclass(frozen=True)
class Quantized:
    """A matrix [M, K] in FP8."""

    values: Tensor  # [M, K] e4m3
    scales: (
        Tensor  # [M, K / tile], or [M / tile, K / tile] for blocks; float32: value × scale is the original
    )

    def dequantize(self) -> Tensor:
        """Return [M, K] in float32, where every product of value and scale is rounded once."""
        tile = self.values.shape[1] // self.scales.shape[1]
        scales = self.scales.repeat_interleave(tile, 1)
        if len(scales) < len(self.values):
            scales = scales.repeat_interleave(tile, 0)
        return self.values.float() * scales


def quantize_tiles(x: Tensor, form: Fp8Format) -> Quantized:
    """Quantize x [M, K] by tiles of 1 × ``form.tile``."""
    tiles = x.unflatten(1, (-1, form.tile))
    values, scales = _quantize(tiles, tiles.abs().amax(2, keepdim=True), form)
    return Quantized(values.flatten(1), scales[..., 0])


def quantize_blocks(x: Tensor, form: Fp8Format) -> Quantized:
    """Quantize x [M, K] by blocks of ``form.tile`` × ``form.tile``."""
    blocks = x.unflatten(1, (-1, form.tile)).unflatten(0, (-1, form.tile))
    values, scales = _quantize(blocks, blocks.abs().amax((1, 3), keepdim=True), form)
    return Quantized(values.flatten(2).flatten(0, 1), scales[:, 0, :, 0])


def _quantize(x: Tensor, amax: Tensor, form: Fp8Format) -> tuple[Tensor, Tensor]:
    """Return e4m3 values of ``x`` and scales of the shape of ``amax``, the largest magnitude of each tile."""
    if form.is_power_of_two:
        exponent = ceil_log2(amax.float() / MAX)
        scales, factors = torch.exp2(exponent), torch.exp2(-exponent)
    else:
        # the quotient is rounded once, from float64 to float32
        factors = (MAX / amax.double().clamp(min=SMALLEST_AMAX)).float()
        scales = 1.0 / factors
    return (x.float() * factors).clamp(-MAX, MAX).to(E4M3), scales


def ceil_log2(x: Tensor) -> Tensor:
    """Return ⌈log₂ x⌉ of x ≥ 0 in the range of e8m0; the lowest exponent for 0, NaN for NaN and infinity."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa · 2^exponent, mantissa in [0.5, 1)
    found = (exponent - (mantissa == 0.5).int()).float().clamp(MIN_EXPONENT, MAX_EXPONENT)
    return torch.where(x == 0, MIN_EXPONENT, found).masked_fill(~x.isfinite(), torch.nan)
