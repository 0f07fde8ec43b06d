"""Bind a process to the CPUs next to its accelerators.

    binding = Binding(numa=(3, 3, 1, 1, 0, 0, 2, 2), num_accelerators=8)
    bind_process(binding, [4, 5])          # an engine on GPUs 4 and 5 → CPUs of NUMA node 0

Memory follows the CPUs: the kernel allocates a page on the NUMA node of the CPU that touches it first. The CPUs of each
accelerator come from the profile (``cpus_of_gpu``, ``numa_of_gpu``) or from the node: the kernel lists the CPUs that
are local to a PCI device. GPUs are numbered by PCI address, as with CUDA_DEVICE_ORDER=PCI_BUS_ID. Standard library
only: guards and ranks use it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.common import env

SYS = Path("/sys")
PROC = Path("/proc")


@dataclass(frozen=True)
class Binding:
    """CPUs of each accelerator of a node; without ``cpus`` and ``numa`` they are read from the node."""

    cpus: tuple[str, ...] | None = None
    numa: tuple[int, ...] | None = None
    num_accelerators: int = 0

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Binding:
        lists = {key: values.get(key) for key in ("cpus", "numa")}
        given = {key: tuple(value) for key, value in lists.items() if value is not None}
        return cls(**given, num_accelerators=values.get("num_accelerators", 0))

    @property
    def is_given(self) -> bool:
        """True if the profile names the CPUs."""
        return self.cpus is not None or self.numa is not None

    def cpus_by_accelerator(
        self, sys_root: Path = SYS, proc_root: Path = PROC
    ) -> list[frozenset[int]] | None:
        """Return the CPUs of each accelerator; None if they are unknown, or the job has only a part of the node."""
        if self.cpus is not None:
            return [parse_cpus(text) for text in self.cpus]
        if self.numa is not None:
            files = [sys_root / f"devices/system/node/node{node}/cpulist" for node in self.numa]
        else:
            addresses = gpu_addresses(sys_root, proc_root)
            if len(addresses) != self.num_accelerators:
                return None
            files = [sys_root / f"bus/pci/devices/{address}/local_cpulist" for address in addresses]
        try:
            found = [parse_cpus(file.read_text().strip()) for file in files]
        except (OSError, ValueError):
            return None
        return found if all(found) else None


def gpu_addresses(sys_root: Path = SYS, proc_root: Path = PROC) -> list[str]:
    """Return the PCI addresses of the node's GPUs, ascending: NVIDIA's driver, else AMD's."""
    nvidia = proc_root / "driver/nvidia/gpus"
    if nvidia.is_dir():
        return sorted(path.name.lower() for path in nvidia.iterdir())
    found = []
    for path in (sys_root / "class/kfd/kfd/topology/nodes").glob("*/properties"):
        lines = (line.split() for line in path.read_text().splitlines())
        values = {words[0]: int(words[1]) for words in lines if len(words) == 2}
        if values.get("simd_count"):
            location = values.get("location_id", 0)
            domain, bus, device = values.get("domain", 0), location >> 8 & 0xFF, location >> 3 & 0x1F
            found.append(f"{domain:04x}:{bus:02x}:{device:02x}.{location & 7}")
    return sorted(found)


def bind_process(binding: Binding | None, accelerators: Collection[int]) -> str:
    """Bind this process, and what it starts, to the CPUs of these accelerators. Return what was done, for the log.

    A process that uses all accelerators of a node, or none, keeps its CPUs. CPUs outside of the job are left out.
    """
    if binding is None or not accelerators or len(accelerators) >= binding.num_accelerators:
        return ""
    cpus = binding.cpus_by_accelerator()
    if cpus is None:
        return ""
    wanted = frozenset[int]().union(*(cpus[index] for index in accelerators if index < len(cpus)))
    allowed = wanted & os.sched_getaffinity(0)
    if not allowed:
        return f"not bound: CPUs {describe_cpus(wanted)} do not belong to the job"
    try:
        os.sched_setaffinity(0, allowed)
    except OSError as error:
        return f"not bound: {error}"
    return (
        f"bound to CPUs {describe_cpus(allowed)} of accelerators {','.join(map(str, sorted(accelerators)))}"
    )


def bind_engine() -> None:
    """Bind this process to the CPUs of all accelerators that the plan gives it; for engines."""
    values = env.binding()
    if values is not None and values.get("is_engine"):
        _bind(values, values["accelerators"])


def bind_rank(local_rank: int) -> None:
    """Bind this process to the CPUs of the accelerator with this index of those that the plan gives the trainer."""
    values = env.binding()
    if values is not None:
        _bind(values, values["accelerators"][local_rank : local_rank + 1])


def _bind(values: Mapping[str, Any], accelerators: Collection[int]) -> None:
    if result := bind_process(Binding.from_json(values), accelerators):
        print(f"binding: {result}", file=sys.stderr, flush=True)


def parse_cpus(text: str) -> frozenset[int]:
    """``0-3,8`` → {0, 1, 2, 3, 8}, the kernel's notation; empty text → none. Raises ValueError."""
    bounds = [[int(number) for number in part.split("-")] for part in text.split(",") if part]
    if any(pair[0] > pair[-1] for pair in bounds):
        raise ValueError("has a range whose first CPU is greater than its last one")
    return frozenset(cpu for pair in bounds for cpu in range(pair[0], pair[-1] + 1))


def describe_cpus(cpus: Iterable[int]) -> str:
    """{0, 1, 2, 3, 8} → ``0-3,8``"""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
