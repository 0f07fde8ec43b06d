"""Reduce the operator tables of aiconfigurator-core to the utilization curves of `plan/predict/hardware/*.json`.

    pip download --no-deps aiconfigurator-core==0.12.0 && unzip -q aiconfigurator_core-*.whl -d WHEEL
    python tools/bench/distill_hardware.py WHEEL/aiconfigurator_core/systems

The tables (Apache-2.0, see NOTICE) hold measured times of single operations of vLLM and NCCL. A curve keeps the median
of speed of light / time of all rows near each grid point: see `primerl_hpc/plan/predict/timing/curves.py`. Needs
pyarrow, which the package does not.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pyarrow import parquet

from primerl_hpc.plan.predict.hardware import GpuSpec, gpu_spec
from primerl_hpc.plan.predict.timing.curves import bus_factor, weight_bytes

SYSTEMS = {
    "A100-SXM-80GB": "a100_sxm",
    "H100-SXM": "h100_sxm",
    "H200-SXM": "h200_sxm",
    "B200": "b200_sxm",
    "B300": "b300_sxm",
    "GB200": "gb200",
    "GB300": "gb300",
    "L40S": "l40s",
    "RTX-PRO-6000": "rtx_pro_6000_server",
}
"""GPU types and the folders of their tables."""
HARDWARE = Path(__file__).resolve().parents[2] / "primerl_hpc" / "plan" / "predict" / "hardware"
SOURCE = "aiconfigurator-core 0.12.0 (Apache-2.0), systems/data"
GEMM_DTYPES = {"bfloat16": "bfloat16", "fp8": "fp8", "nvfp4": "fp4"}
MOE_TABLES = {
    "bfloat16": (("bfloat16", ""),),
    "fp8": (("fp8_block", ""),),
    "int4": (("int4_wo", ""),),
    "fp4": (("nvfp4", "trtllm"), ("nvfp4", "cutlass"), ("w4a16_mxfp4", "gptoss"), ("w4a8_mxfp4_mxfp8", "")),
}
"""Rows of ``moe_dtype`` whose kernel's name contains the second word. Released fp8 mixtures (DeepSeek, Qwen3, MiniMax)
are scaled by block; kernels that vLLM does not choose for released models are left out."""
LIGHT = 0.95
"""Highest utilization of a matrix product that is kept: benchmarks repeat one matrix, which a large cache holds."""
GEMM_AXES = (
    [1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768],
    [2.0**exponent for exponent in range(18, 31, 2)],
)
MOE_AXES = ([2.0**exponent for exponent in range(0, 13, 2)], [2.0**exponent for exponent in range(24, 35, 2)])
DECODE_AXES = ([1, 4, 16, 64, 256, 1024], [2.0**exponent for exponent in range(14, 31, 2)])
CONTEXT_AXES = (
    [128, 512, 1024, 2048, 4096, 8192, 16384],
    [2.0**exponent for exponent in range(1, 10, 2)],
)


def rows(path: Path | None) -> list[dict[str, Any]]:
    return parquet.read_table(path).to_pylist() if path else []


def newest(folder: Path, kind: str, framework: str, table: str) -> Path | None:
    """Return the table of the newest version, or None."""
    found = sorted((folder / kind / framework).glob(f"*/{table}_perf.parquet"), key=lambda path: path.parts)
    return found[-1] if found else None


Points = Iterable[tuple[tuple[float, ...], float]]
"""Coordinates and utilization of table rows."""


def grid(axes: tuple[list[float], ...], points: Points) -> Any:
    """Return the medians of utilization at the grid points, nested; holes take the nearest value along the axes."""
    near: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for at, utilization in points:
        near[tuple(nearest(axis, x) for axis, x in zip(axes, at, strict=True))].append(utilization)
    if not near:
        return None
    medians = {cell: statistics.median(values) for cell, values in near.items()}

    def value(cell: tuple[int, ...]) -> float:
        best = min(medians, key=lambda other: sum(abs(a - b) for a, b in zip(cell, other, strict=True)))
        return round(medians[best], 4)

    def nest(prefix: tuple[int, ...]) -> Any:
        if len(prefix) == len(axes):
            return value(prefix)
        return [nest((*prefix, index)) for index in range(len(axes[len(prefix)]))]

    return nest(())


def nearest(axis: list[float], at: float) -> int:
    return min(range(len(axis)), key=lambda index: abs(math.log(axis[index] / max(at, 1e-9))))


def light(gpu: GpuSpec, flops: float, moved: float, dtype: str) -> float:
    return max(flops / gpu.peak(dtype).value, moved / gpu.hbm_bytes_per_s)


def gemm_points(gpu: GpuSpec, table: list[dict[str, Any]], dtype: str) -> Iterator[tuple[tuple, float]]:
    for row in table:
        m, n, k = row["m"], row["n"], row["k"]
        if GEMM_DTYPES.get(row["gemm_dtype"]) == dtype and min(n, k) >= 256 and row["latency"] > 0:
            moved = n * k * weight_bytes(dtype) + 2 * m * (n + k)
            utilization = light(gpu, 2 * m * n * k, moved, dtype) / (row["latency"] / 1e3)
            yield (m, n * k), min(utilization, LIGHT)


def moe_points(gpu: GpuSpec, table: list[dict[str, Any]], dtype: str) -> Iterator[tuple[tuple, float]]:
    """Yield points of skewed routing only; the experts that are hit are counted as for uniform routing."""
    for row in table:
        kernel = row["kernel_source"]
        if not any(row["moe_dtype"] == table and word in kernel for table, word in MOE_TABLES[dtype]):
            continue
        if row["moe_ep_size"] != 1:
            continue
        if row["distribution"] == "balanced" or row["latency"] <= 0:
            continue
        experts, chosen, tokens = row["num_experts"], row["topk"], row["num_tokens"]
        width, hidden = row["inter_size"] / row["moe_tp_size"], row["hidden_size"]
        hit = experts * (1 - (1 - chosen / experts) ** tokens)
        each = 3 * hidden * width
        moved = hit * each * weight_bytes(dtype) + 2 * tokens * chosen * (2 * hidden + 3 * width)
        ideal = light(gpu, 2 * tokens * chosen * each, moved, dtype)
        yield (tokens * chosen / hit, hit * each), ideal / (row["latency"] / 1e3)


def decode_points(gpu: GpuSpec, table: list[dict[str, Any]], dtype: str) -> Iterator[tuple[tuple, float]]:
    for row in table:
        if row["kv_cache_dtype"] != dtype or row["head_dim"] not in (64, 128) or row["latency"] <= 0:
            continue
        context = row["step"] + row["isl"]
        context = min(context, row["window_size"]) if row.get("window_size") else context
        kv_bytes = 2 * context * row["num_key_value_heads"] * row["head_dim"] * weight_bytes(dtype)
        ideal = row["batch_size"] * kv_bytes / gpu.hbm_bytes_per_s
        yield (row["batch_size"], kv_bytes), ideal / (row["latency"] / 1e3)


def context_points(gpu: GpuSpec, table: list[dict[str, Any]]) -> Iterator[tuple[tuple, float]]:
    for row in table:
        if row["kv_cache_dtype"] != "bfloat16" or row.get("window_size") or row["head_dim"] not in (64, 128):
            continue
        heads = row["batch_size"] * row["num_heads"]
        flops = 2 * heads * row["isl"] ** 2 * row["head_dim"]
        if row["latency"] > 0 and row["isl"] >= 64:
            yield (row["isl"], heads), flops / gpu.peak_flops["bfloat16"] / (row["latency"] / 1e3)


def collectives(gpu: GpuSpec, folder: Path) -> dict[str, Any]:
    """Return bus bandwidth in B/s by number of GPUs and bytes. Sizes of the tables are elements of two bytes."""
    tables = {"nccl": rows(newest(folder, "comm", "nccl", "nccl"))}
    tables["vllm"] = rows(newest(folder, "comm", "vllm", "custom_allreduce"))
    points: dict[str, list[tuple[tuple[float, ...], float]]] = defaultdict(list)
    for row in tables["nccl"]:
        kind = row["op_name"]
        if row["nccl_dtype"] == "half" and row["latency"] > 0:
            name = "all_reduce_nccl" if kind == "all_reduce" else kind
            points[name].append(_bus(kind, row))
    for row in tables["vllm"]:
        if row.get("backend", "vllm_graph").endswith("graph") and row["latency"] > 0:
            points["all_reduce"].append(_bus("all_reduce", row))
    points.setdefault("all_reduce", points.get("all_reduce_nccl", []))
    curves = {}
    for kind, found in points.items():
        axes = (
            sorted({gpus for (gpus, _), _ in found}),
            [2.0**exponent for exponent in range(10, 31, 2)],
        )
        if values := grid(axes, found):
            speeds = [[float(f"{speed:.3g}") for speed in line] for line in values]
            curves[kind] = {"axes": axes, "values": speeds, "link_bytes_per_s": gpu.link_bytes_per_s}
    return curves


def _bus(kind: str, row: dict[str, Any]) -> tuple[tuple[float, float], float]:
    size = 2.0 * row["message_size"]
    return (row["num_gpus"], size), bus_factor(kind, row["num_gpus"]) * size / (row["latency"] / 1e3)


def distill(gpu: GpuSpec, folder: Path) -> dict[str, Any]:
    """Return all curves of a GPU type with their source."""
    gemm = rows(newest(folder, "gemm", "vllm", "gemm"))
    moe = rows(newest(folder, "moe", "vllm", "moe"))
    decode = rows(newest(folder, "attention", "vllm", "generation_attention"))
    context = rows(newest(folder, "attention", "vllm", "context_attention"))
    curves: dict[str, Any] = {
        "source": f"{SOURCE}/{folder.name}, vLLM and NCCL tables",
        "date": "2026-08-21",
        "gemm": by_dtype(GEMM_AXES, {x: gemm_points(gpu, gemm, x) for x in set(GEMM_DTYPES.values())}),
        "moe": by_dtype(MOE_AXES, {x: moe_points(gpu, moe, x) for x in MOE_TABLES}),
        "decode_attention": by_dtype(
            DECODE_AXES, {x: decode_points(gpu, decode, x) for x in ("bfloat16", "fp8")}
        ),
        "context_attention": {
            "axes": CONTEXT_AXES,
            "values": grid(CONTEXT_AXES, context_points(gpu, context)),
        },
        "collectives": collectives(gpu, folder),
    }
    return curves


def by_dtype(axes: tuple[list[float], ...], points: dict[str, Points]) -> dict[str, Any]:
    grids = {dtype: grid(axes, found) for dtype, found in sorted(points.items())}
    return {dtype: {"axes": axes, "values": values} for dtype, values in grids.items() if values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("systems", type=Path, help="folder systems/ of the unpacked wheel")
    arguments = parser.parse_args()
    for name, folder in SYSTEMS.items():
        path = HARDWARE / f"{name.lower()}.json"
        fact = json.loads(path.read_text("utf-8"))
        curves = distill(gpu_spec(name), arguments.systems / "data" / folder)
        fact.pop("curves", None)
        head = json.dumps(fact, indent=1, ensure_ascii=False).removesuffix("\n}")
        path.write_text(f'{head},\n "curves": {dump(curves)}\n}}\n', "utf-8")
        print(f"{name}: {path.stat().st_size} bytes, {', '.join(curves)}")


def dump(curves: dict[str, Any]) -> str:
    """Return JSON with one line for each curve."""
    lines = []
    for key, value in curves.items():
        if isinstance(value, dict) and "axes" not in value:
            inner = [f"   {json.dumps(dtype)}: {json.dumps(curve)}" for dtype, curve in value.items()]
            lines.append(f"  {json.dumps(key)}: {{\n" + ",\n".join(inner) + "\n  }")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n }"


if __name__ == "__main__":
    main()
