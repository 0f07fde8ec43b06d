"""Measurements of `primerl-hpc calibrate`: what the curves predict for them, and a GPU type corrected by them.

    probe_seconds(spec, {"figure": "hardware.gemm", "rows": 256, "width": 4096, "dtype": "bfloat16"})
    spec = calibrated_spec(gpu_spec("H100-SXM"), corrections)

A correction is measured / predicted time. The curves of the corrected type are divided by it, so every figure that
rests on them changes. Peaks and the datasheet's bandwidth stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.plan.predict.hardware import GpuSpec
from primerl_hpc.plan.predict.ledger import Correction
from primerl_hpc.plan.predict.timing.curves import Operations

COPY_SHARE = 0.9
"""Share of the datasheet's bandwidth that a large copy reaches: the edge of the distilled decode attention, which only
reads, is 0.86–0.94 on A100, H100, H200 and B200."""
CORRECTED_CURVES: dict[str, tuple[str, ...]] = {
    "hardware.gemm": ("gemm", "moe"),
    "hardware.copy": ("decode_attention",),
    "hardware.all_gather": ("all_gather", "reduce_scatter", "alltoall"),
    "hardware.all_reduce": ("all_reduce", "all_reduce_nccl"),
}
"""Figure of `calibrate` → curves that it corrects; the last two are in ``collectives``."""


def probe_seconds(gpu: GpuSpec, probe: Mapping[str, Any]) -> float | None:
    """Return the predicted duration of a measurement; None for a type without curves, and for writing a file."""
    operations = Operations(gpu)
    try:
        match probe["figure"]:
            case "hardware.gemm":
                width = probe["width"]
                return operations.gemm(probe["rows"], width, width, probe["dtype"])
            case "hardware.copy":
                return 2 * probe["bytes"] / (COPY_SHARE * gpu.hbm_bytes_per_s)
            case "hardware.all_gather":
                return operations.collective("all_gather", probe["bytes"], probe["ranks"])
            case "hardware.all_reduce":
                return Operations(_with_nccl(gpu)).collective("all_reduce", probe["bytes"], probe["ranks"])
            case _:
                return None
    except ConfigError:
        return None


def _with_nccl(gpu: GpuSpec) -> GpuSpec:
    """Return the type with NCCL's all-reduce, which torch uses, in place of the faster one of vLLM."""
    collectives = gpu.curves.get("collectives", {})
    if "all_reduce_nccl" not in collectives:
        return gpu
    changed = {**collectives, "all_reduce": collectives["all_reduce_nccl"]}
    return replace(gpu, curves={**gpu.curves, "collectives": changed})


def probe_layout(probe: Mapping[str, Any]) -> str:
    """Return what distinguishes measurements of one figure: ``rows 256, width 4096, bfloat16``."""
    words = {"rows": "rows {}", "width": "width {}", "dtype": "{}", "bytes": "{} bytes", "ranks": "{} ranks"}
    return ", ".join(text.format(probe[name]) for name, text in words.items() if name in probe)


def calibrated_spec(gpu: GpuSpec, corrections: Mapping[str, Correction]) -> GpuSpec:
    """Return the type with its curves divided by the corrections of `calibrate`; the same type without any."""
    if not gpu.curves or not corrections.keys() & CORRECTED_CURVES.keys():
        return gpu
    curves = {**gpu.curves, "collectives": dict(gpu.curves.get("collectives", {}))}
    for figure, names in CORRECTED_CURVES.items():
        if figure not in corrections:
            continue
        factor = corrections[figure].factor
        for name in names:
            for place in (curves, curves["collectives"]):
                if name in place:
                    place[name] = _divided(place[name], factor)
    return replace(gpu, curves=curves)


def _divided(curve: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return a curve, or one for each data type, with all values divided by ``factor``."""
    if "values" in curve:
        return {**curve, "values": _divided_values(curve["values"], factor)}
    return {dtype: _divided(found, factor) for dtype, found in curve.items()}


def _divided_values(values: Any, factor: float) -> Any:
    if isinstance(values, list):
        return [_divided_values(value, factor) for value in values]
    return values / factor
