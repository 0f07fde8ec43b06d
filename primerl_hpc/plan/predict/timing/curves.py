"""Measured utilization of a GPU, interpolated; times of single operations.

A curve holds ``utilization = speed of light / measured time`` on a grid, never times: between grid points utilization
is smooth where times are not. The speed of light of an operation is the larger of FLOP / peak and bytes / bandwidth.
Interpolation is linear in the logarithms; outside a grid its edge counts.

Sources: tables of vLLM 0.14–0.24 and NCCL in aiconfigurator-core 0.12.0 (Apache-2.0, see NOTICE); the method
follows its documentation of "util space".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.plan.predict.hardware import GpuSpec
from primerl_hpc.plan.predict.layouts import DTYPE_BYTES

FLOOR_S = 2e-6
"""Shortest kernel in a CUDA graph, seconds: the smallest times of the distilled tables are 2–5 µs."""

BEST_ATTENTION = 0.75
"""Bound of extrapolated utilization of attention; FlashAttention 3 reports 740 of 989 TFLOP/s (arXiv 2407.08608)."""


def interpolate(axes: Sequence[Sequence[float]], values: Any, at: Sequence[float]) -> float:
    """Return the value at a point of a rectangular grid, linear in the logarithms of axes and values.

    ``values`` is nested as deep as there are axes. Axes ascend and are positive; points outside move to the edge.
    """
    if not axes:
        return float(values)
    index, share = _position(axes[0], at[0])
    low = interpolate(axes[1:], values[index], at[1:])
    if share == 0.0:
        return low
    high = interpolate(axes[1:], values[index + 1], at[1:])
    return math.exp((1 - share) * math.log(low) + share * math.log(high))


def _position(axis: Sequence[float], at: float) -> tuple[int, float]:
    """Return the grid point below ``at`` and the share of the way to the next one."""
    if at <= axis[0]:
        return 0, 0.0
    if at >= axis[-1]:
        return len(axis) - 1, 0.0
    index = next(i for i in range(len(axis) - 1) if at < axis[i + 1])
    return index, math.log(at / axis[index]) / math.log(axis[index + 1] / axis[index])


@dataclass(frozen=True)
class Operations:
    """Times in seconds of single operations on one GPU type. Raises ConfigError for a type without curves."""

    gpu: GpuSpec

    @cached_property
    def curves(self) -> Mapping[str, Any]:
        if not self.gpu.curves:
            raise ConfigError(f"no measured utilization for GPU type {self.gpu.name}", location="node.gpu")
        return self.gpu.curves

    def gemm(self, rows: float, inputs: float, outputs: float, dtype: str = "bfloat16") -> float:
        """Return the time of ``[rows, inputs] × [inputs, outputs]`` with weights of this type."""
        if min(rows, inputs, outputs) <= 0:
            return 0.0
        weights = inputs * outputs
        moved = weights * weight_bytes(dtype) + 2 * rows * (inputs + outputs)
        light = self.light(2 * rows * weights, moved, dtype)
        curve = self._by_dtype("gemm", dtype)
        return max(light / interpolate(curve["axes"], curve["values"], (rows, weights)), FLOOR_S)

    def experts(self, choices: float, hit: float, width: int, hidden: int, dtype: str = "bfloat16") -> float:
        """Return the time of gated experts of ``width`` columns: ``choices`` pairs of token and expert on this GPU,
        which use ``hit`` experts."""
        if choices <= 0:
            return 0.0
        each = 3 * hidden * width
        moved = hit * each * weight_bytes(dtype) + 2 * choices * (2 * hidden + 3 * width)
        light = self.light(2 * choices * each, moved, dtype)
        curve = self._by_dtype("moe", dtype)
        point = (choices / hit, hit * each)
        return max(light / interpolate(curve["axes"], curve["values"], point), FLOOR_S)

    def decode_attention(self, sequences: float, kv_bytes: float, kv_dtype: str = "bfloat16") -> float:
        """Return the time of attention of one new token each; ``kv_bytes``: keys and values that a sequence reads."""
        if sequences <= 0 or kv_bytes <= 0:
            return 0.0
        curve = self._by_dtype("decode_attention", kv_dtype)
        light = sequences * kv_bytes / self.gpu.hbm_bytes_per_s
        return max(light / interpolate(curve["axes"], curve["values"], (sequences, kv_bytes)), FLOOR_S)

    def context_attention(self, tokens: float, heads: float, flops: float) -> float:
        """Return the time of causal attention in forward. ``tokens``: length of a sequence; ``heads``: heads of all
        sequences on this GPU; ``flops``: of the visible pairs, all heads."""
        if flops <= 0:
            return 0.0
        curve = self.curves["context_attention"]
        light = flops / self.gpu.peak_flops["bfloat16"]
        utilization = interpolate(curve["axes"], curve["values"], (tokens, heads))
        longest = curve["axes"][0][-1]
        if tokens > longest:
            # the tables end at 16,384 tokens: the rise of the last doubling continues, up to what is reached anywhere
            before = interpolate(curve["axes"], curve["values"], (longest / 2, heads))
            rise = math.log2(tokens / longest) * math.log(max(1.0, utilization / before))
            utilization = max(utilization, min(utilization * math.exp(rise), BEST_ATTENTION))
        return max(light / utilization, FLOOR_S)

    def collective(self, kind: str, size: float, gpus: int) -> float:
        """Return the time of ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``alltoall`` inside a node.

        ``size``: bytes of the complete message. The curve holds the bus bandwidth; its smallest sizes give the latency.
        """
        if gpus <= 1 or size <= 0:
            return 0.0
        curve = self.curves["collectives"][kind]
        smallest = curve["axes"][1][0]
        speed = interpolate(curve["axes"], curve["values"], (gpus, max(size, smallest)))
        scale = self.gpu.link_bytes_per_s / curve["link_bytes_per_s"]
        return bus_factor(kind, gpus) * max(size, smallest) / (speed * scale)

    def light(self, flops: float, moved: float, dtype: str) -> float:
        """Return the speed of light in seconds: FLOP at the peak or bytes at the full bandwidth."""
        return max(flops / self.gpu.peak(dtype).value, moved / self.gpu.hbm_bytes_per_s)

    def _by_dtype(self, kind: str, dtype: str) -> Mapping[str, Any]:
        curves = self.curves[kind]
        return curves.get(dtype) or curves.get(NEAREST.get(dtype, "bfloat16")) or curves["bfloat16"]


NEAREST = {"fp4": "fp8", "int4": "bfloat16", "int8": "fp8", "float16": "bfloat16"}
"""Curve that stands for a data type without one of its own."""


def weight_bytes(dtype: str) -> float:
    """Return bytes of a weight with the scales of quantized formats: blocks of 32 with one byte (fp4), of 32 with two
    (int4). Those of fp8, 0.02 %, are left out, as in the distilled curves."""
    return DTYPE_BYTES[dtype] + {"fp4": 1 / 32, "int4": 2 / 32}.get(dtype, 0.0)


def bus_factor(kind: str, gpus: int) -> float:
    """Return bytes on the busiest link for each byte of the message (NCCL's convention of bus bandwidth)."""
    share = (gpus - 1) / gpus
    return 2 * share if kind == "all_reduce" else share
