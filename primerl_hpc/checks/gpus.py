"""Facts about GPUs and their driver: NVIDIA's by NVML, AMD's by the kernel's list of compute nodes."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.checks.findings import Finding, bad, ok, warn
from primerl_hpc.checks.table import Subject
from primerl_hpc.cluster.software_schema import RoleSoftware
from primerl_hpc.common.names import Role

GIB = 2**30
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


def gpus(subject: Subject) -> Iterator[Finding]:
    yield from check_gpus(subject.num_gpus, subject.wants.get("vendor", "nvidia"))


def check_gpus(wanted: int, vendor: str = "nvidia") -> Iterator[Finding]:
    if wanted == 0:
        return
    if vendor == "amd":
        yield judge_count(count_amd_gpus(), wanted)
        return
    try:
        import pynvml  # pyright: ignore[reportMissingImports]  only in environments with GPUs
    except ImportError:
        yield warn("not checked: nvidia-ml-py is not installed", "pip install nvidia-ml-py")
        return
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        yield bad(f"NVML: {error}", "the driver does not work: report the node")
        return
    facts = []
    for index in range(count):
        try:
            facts.append(_gpu_facts(pynvml, index))
        except pynvml.NVMLError as error:  # such as "GPU is lost"
            yield bad(f"GPU {index}: {error}", "the GPU needs a reset: report the node")
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
    kind = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    _, _, is_pending, has_failed = query("nvmlDeviceGetRemappedRows", otherwise=(0, 0, 0, 0))
    memory = query("nvmlDeviceGetMemoryInfo", otherwise=None)
    return GpuFacts(
        index=index,
        name=name.decode() if isinstance(name, bytes) else name,
        uncorrected_errors=query("nvmlDeviceGetTotalEccErrors", *kind, otherwise=None),
        is_remap_pending=bool(is_pending),
        has_remap_failed=bool(has_failed),
        slowed_by=query("nvmlDeviceGetCurrentClocksThrottleReasons", otherwise=0),
        memory_used_gib=None if memory is None else memory.used / GIB,
    )


def judge_gpus(facts: list[GpuFacts], wanted: int) -> Iterator[Finding]:
    """Bad: too few GPUs, or one with memory errors. Warning: one that is slowed down or in use."""
    is_fine = len(facts) >= wanted
    if not is_fine:
        message = f"{len(facts)} GPUs respond, the plan needs {wanted}"
        yield bad(message, "a GPU fell off the bus: report the node")
    for gpu in facts:
        faults = [
            *([f"{gpu.uncorrected_errors} uncorrected memory errors"] if gpu.uncorrected_errors else []),
            *(["a row remap is pending"] if gpu.is_remap_pending else []),
            *(["a row remap has failed"] if gpu.has_remap_failed else []),
        ]
        if faults:
            is_fine = False
            yield bad(f"GPU {gpu.index}: {', '.join(faults)}", "the GPU needs a reset: report the node")
        if reasons := [reason for bit, reason in SLOWED_DOWN.items() if gpu.slowed_by & bit]:
            message = f"GPU {gpu.index} is slowed down: {', '.join(reasons)}"
            yield warn(message, "check its cooling and power")
        if gpu.memory_used_gib is not None and gpu.memory_used_gib > 4:
            message = f"GPU {gpu.index} has {gpu.memory_used_gib:.1f} GiB in use"
            yield warn(message, "check for other processes on the GPU")
    if is_fine:
        yield ok(f"{len(facts)} × {facts[0].name}" if facts else "none")


def count_amd_gpus(nodes: Path = KFD_NODES) -> int | None:
    """Return the number of GPUs, or GCDs, that AMD's driver lists; None without that driver."""
    try:
        properties = [path.read_text() for path in nodes.glob("*/properties")]
    except OSError:
        return None
    lines = [line for text in properties for line in text.splitlines()]
    found = [line for line in lines if line.startswith("simd_count ") and int(line.split()[1]) > 0]
    return len(found) if properties else None


def judge_count(found: int | None, wanted: int) -> Finding:
    if found is None:
        return bad("AMD's driver (amdkfd) lists no devices", "the driver does not work: report the node")
    if found < wanted:
        return bad(f"{found} GPUs found, the plan needs {wanted}", "a GPU is missing: report the node")
    return ok(f"{found} GPUs")


# -- the driver ------------------------------------------------------------------------------------


def driver(subject: Subject) -> Iterator[Finding]:
    """Compare NVIDIA's driver with the CUDA version for which torch was built."""
    software = None if subject.is_node else subject.profile.software.of_role(Role.TRAINER)
    yield judge_driver(installed_driver(), torch_cuda(), missing_torch(software))


def missing_torch(software: RoleSoftware | None) -> str:
    """Describe an interpreter without torch for CUDA. ``software``: of the trainer, on a login node."""
    if importlib.util.find_spec("torch") is not None:
        return "torch is built without CUDA"
    if software is None:
        return "torch is not installed"
    if software.python not in (None, sys.executable) or software.container.kind != "none":
        return "torch is not installed here and need not be: the trainer has another interpreter"
    return "torch is not installed here: the trainer of this profile needs it"


def judge_driver(found: tuple[str, int] | str, wanted: str | None, missing: str = "") -> Finding:
    """Judge whether torch can use the driver. ``found``: versions of the driver and of its CUDA (12.4: 12040), or why
    there is none. ``missing``: as `missing_torch`.

    A driver runs programs of its own major CUDA version and of earlier ones (NVIDIA, "CUDA Compatibility").
    """
    built = f"; torch was built for CUDA {wanted}" if wanted else f"; {missing}"
    if isinstance(found, str):
        return ok(found + built)
    version, cuda = found
    message = f"{version}, CUDA {cuda // 1000}.{cuda % 1000 // 10}{built}"
    if wanted is None or int(wanted.partition(".")[0]) <= cuda // 1000:
        return ok(message)
    return bad(message, "update the driver, or install a torch for its CUDA version")


def installed_driver() -> tuple[str, int] | str:
    """Return the versions of NVIDIA's driver and of its CUDA, or why they are not known."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]  only in environments with GPUs
    except ImportError:
        has_driver = Path("/proc/driver/nvidia/version").exists()
        return "not checked: pip install nvidia-ml-py" if has_driver else "no NVIDIA driver on this machine"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"no NVIDIA driver on this machine ({error})"
    try:
        text, cuda = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion()
    except pynvml.NVMLError as error:
        return f"the driver does not report its version ({error})"
    finally:
        pynvml.nvmlShutdown()
    return text.decode() if isinstance(text, bytes) else text, int(cuda)


def torch_cuda() -> str | None:
    """Return the CUDA version of the installed torch without importing it; None for a build without CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text()
    match = re.search(r"^cuda.*= *'([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else None
