"""Checks of a node's GPUs for the preflight: NVIDIA's by NVML, AMD's by the kernel's list of compute nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30
Results = Iterator[tuple[str, ...]]
"""(level, message[, hint])"""
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
"""Compute nodes of AMD's driver: CPUs, and GPUs (with SIMD units)."""
SLOWED_DOWN = {0x8: "hardware slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake"}
"""Bits of NVML's nvmlClocksEventReasons."""


@dataclass(frozen=True)
class GpuFacts:
    """NVML's data about one GPU; None where the GPU does not support the query."""

    index: int
    name: str
    uncorrected_errors: int | None
    """Volatile: since the driver was loaded."""
    is_remap_pending: bool
    """A memory row is waiting to be remapped, which requires a reset of the GPU."""
    has_remap_failed: bool
    slowed_by: int
    memory_used_gib: float | None


def check_gpus(wanted: int, vendor: str = "nvidia") -> Results:
    if wanted == 0:
        return
    if vendor == "amd":
        yield from judge_count(count_amd_gpus(), wanted)
        return
    try:
        import pynvml  # pyright: ignore[reportMissingImports]  only in environments with GPUs
    except ImportError:
        yield "warn", "not checked: nvidia-ml-py is not installed", "pip install nvidia-ml-py"
        return
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        yield "bad", f"NVML: {error}", "the driver does not work: report the node"
        return
    facts = []
    for index in range(count):
        try:
            facts.append(_gpu_facts(pynvml, index))
        except pynvml.NVMLError as error:  # such as "GPU is lost"
            yield "bad", f"GPU {index}: {error}", "the GPU needs a reset: report the node"
    pynvml.nvmlShutdown()
    yield from judge_gpus(facts, wanted)


def _gpu_facts(nvml: Any, index: int) -> GpuFacts:
    """Query one GPU. Raises NVMLError if it does not respond; a query that it does not support has no result.

    Without support: memory of GPUs that share the host's (Grace, Jetson), ECC and clocks of MIG instances.
    """
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    unsupported = (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_NoPermission,
        nvml.NVMLError_InvalidArgument,
    )

    def query(function: str, *arguments: Any, otherwise: Any) -> Any:
        try:
            return getattr(nvml, function)(handle, *arguments)
        except unsupported:
            return otherwise

    name = query("nvmlDeviceGetName", otherwise="GPU")
    errors = query(
        "nvmlDeviceGetTotalEccErrors",
        nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        nvml.NVML_VOLATILE_ECC,
        otherwise=None,
    )
    _, _, is_pending, has_failed = query("nvmlDeviceGetRemappedRows", otherwise=(0, 0, 0, 0))
    slowed_by = query("nvmlDeviceGetCurrentClocksThrottleReasons", otherwise=0)
    memory = query("nvmlDeviceGetMemoryInfo", otherwise=None)
    return GpuFacts(
        index=index,
        name=name.decode() if isinstance(name, bytes) else name,
        uncorrected_errors=errors,
        is_remap_pending=bool(is_pending),
        has_remap_failed=bool(has_failed),
        slowed_by=slowed_by,
        memory_used_gib=None if memory is None else memory.used / GIB,
    )


def judge_gpus(facts: list[GpuFacts], wanted: int) -> Results:
    """Bad: too few GPUs, or one with memory errors. Warning: one that is slowed down or in use."""
    is_fine = True
    if len(facts) < wanted:
        is_fine = False
        yield (
            "bad",
            f"{len(facts)} GPUs respond, the plan needs {wanted}",
            "a GPU fell off the bus: report the node",
        )
    for gpu in facts:
        faults = []
        if gpu.uncorrected_errors:
            faults.append(f"{gpu.uncorrected_errors} uncorrected memory errors")
        if gpu.is_remap_pending:
            faults.append("a row remap is pending")
        if gpu.has_remap_failed:
            faults.append("a row remap has failed")
        if faults:
            is_fine = False
            yield "bad", f"GPU {gpu.index}: {', '.join(faults)}", "the GPU needs a reset: report the node"
        reasons = [reason for bit, reason in SLOWED_DOWN.items() if gpu.slowed_by & bit]
        if reasons:
            yield (
                "warn",
                f"GPU {gpu.index} is slowed down: {', '.join(reasons)}",
                "check its cooling and power",
            )
        if gpu.memory_used_gib is not None and gpu.memory_used_gib > 4:
            message = f"GPU {gpu.index} has {gpu.memory_used_gib:.1f} GiB in use"
            yield "warn", message, "check for other processes on the GPU"
    if is_fine:
        yield "ok", f"{len(facts)} × {facts[0].name}" if facts else "none"


def count_amd_gpus(nodes: Path = KFD_NODES) -> int | None:
    """Return the number of GPUs, or GCDs, that AMD's driver lists; None without that driver."""
    try:
        properties = [path.read_text() for path in nodes.glob("*/properties")]
    except OSError:
        return None
    if not properties:
        return None
    return sum(
        1
        for text in properties
        for line in text.splitlines()
        if line.startswith("simd_count ") and int(line.split()[1]) > 0
    )


def judge_count(found: int | None, wanted: int) -> Results:
    if found is None:
        yield "bad", "AMD's driver (amdkfd) lists no devices", "the driver does not work: report the node"
    elif found < wanted:
        yield "bad", f"{found} GPUs found, the plan needs {wanted}", "a GPU is missing: report the node"
    else:
        yield "ok", f"{found} GPUs"
