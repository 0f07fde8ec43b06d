"""Hardware of a node: the profile's ``node``, and other types of nodes at the same site (``node_types``).

    node_types:
      l40s: {partition: l40s, nodes: 8, gpus: 8, gpu: L40S, gpu_memory_gib: 48, cores: 64}

A recipe selects a type with ``layout.trainer.node_type`` or ``layout.inference.node_type``.
"""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import model_validator

from primerl_hpc.cluster.value_types import CpuList, Memory, OneLine, Word
from primerl_hpc.common.block import Block, NonNegativeInt, PositiveFloat, PositiveInt


class Node(Block):
    """Hardware of one node."""

    gpus: NonNegativeInt = 8
    """Number of GPUs; 0: ``cpu_slots`` are used instead."""
    cpu_slots: PositiveInt = 4
    """On nodes without GPUs: number of engines and trainer ranks that may share the node."""
    gpu: OneLine | None = None
    """GPU model, e.g. ``H100-SXM``."""
    gpu_vendor: Literal["nvidia", "amd"] | None = None
    """GPU vendor, which selects the driver mounted into containers (``--nv``, ``--rocm``). Null: derived from ``gpu``;
    nvidia if unknown."""
    arch: Literal["x86_64", "aarch64"] | None = None
    """Processor architecture. Interpreters and images of another one are refused before submission and by the
    preflight. Null: not checked."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of one GPU in GiB."""
    cores: PositiveInt = 1
    """Number of CPUs that a run may use, as SLURM counts them (``--cpus-per-task``): cores, or hardware threads where
    SLURM counts those (see ``threads_per_core``)."""
    threads_per_core: PositiveInt | None = None
    """Hardware threads of a core to use (``--threads-per-core``); 1: ``cores`` are physical ones. Null: no option."""
    memory_gib: PositiveFloat | None = None
    """Memory of the node that a run may use, in GiB, as SLURM counts it."""
    host_memory_gib: PositiveFloat | None = None
    """Memory of the host alone, in GiB, where SLURM's memory includes that of the GPUs (GH200). Null:
    ``memory_gib``."""
    numa_of_gpu: tuple[NonNegativeInt, ...] | None = None
    """NUMA node of each GPU, in the order of the GPU indices. Null: read from the node."""
    cpus_of_gpu: tuple[CpuList, ...] | None = None
    """CPUs of each GPU, or of each CPU slot on nodes without GPUs: ``[0-71, 72-143]``. Null: those of its NUMA node."""
    binding: Literal["auto", "none"] = "auto"
    """``auto``: bind engines and trainer ranks to the CPUs next to their GPUs, by ``cpus_of_gpu``, ``numa_of_gpu`` or
    the topology that the node reports; ``none``: leave the processes on all CPUs of the job."""

    @property
    def is_grace_hopper(self) -> bool:
        """True for nodes of GH200, Grace CPUs with Hopper GPUs."""
        return re.search(r"\bGH\d{3}", self.gpu or "") is not None

    @model_validator(mode="after")
    def _maps_have_an_entry_for_each_gpu(self) -> Self:
        expected = self.gpus or self.cpu_slots
        for key in ("numa_of_gpu", "cpus_of_gpu"):
            if (given := getattr(self, key)) is not None and len(given) != expected:
                what = "GPUs" if self.gpus else "CPU slots"
                raise ValueError(f"{key} has {len(given)} entries for {expected} {what}")
        if self.numa_of_gpu is not None and self.cpus_of_gpu is not None:
            raise ValueError("numa_of_gpu and cpus_of_gpu are mutually exclusive")
        return self

    @model_validator(mode="after")
    def _host_memory_is_a_part(self) -> Self:
        if self.host_memory_gib and self.memory_gib and self.host_memory_gib > self.memory_gib:
            raise ValueError(
                f"host_memory_gib {self.host_memory_gib:g} must be at most memory_gib {self.memory_gib:g}"
            )
        return self

    @property
    def accelerators(self) -> int:
        """Number of GPUs, or of CPU slots on nodes without GPUs."""
        return self.gpus or self.cpu_slots


class NodeType(Node):
    """Nodes of another type than ``node``: their hardware, and how to request them. All other options of the job are
    those of ``scheduler``."""

    nodes: PositiveInt
    """Maximum number of nodes of this type in a job."""
    spare_nodes: NonNegativeInt = 0
    """Additional nodes that replace bad and lost nodes of this type, and are idle until then."""
    partition: OneLine | None = None
    """Partition of these nodes; default: the partition of ``scheduler``."""
    account: OneLine | None = None
    """Account to charge; default: the account of ``scheduler``."""
    qos: OneLine | None = None
    """Quality of service; default: the one of ``scheduler``."""
    constraint: OneLine | None = None
    """Node features to request. ``scheduler.constraint`` does not apply to these nodes."""
    reservation: OneLine | None = None
    """Reservation of nodes of this type. ``scheduler.reservation`` does not apply to these nodes."""
    gpu_type: Word | None = None
    """GPU type in the request: ``l40s`` in ``gpu:l40s:8``. ``scheduler.gpu_type`` does not apply to these nodes."""
    gres: tuple[OneLine, ...] = ()
    """Generic resources of each node in addition to GPUs. ``scheduler.gres`` does not apply to these nodes."""
    memory: Memory | None = "0"
    """Memory of a node, as in ``scheduler.memory``."""

    @model_validator(mode="after")
    def _spare_nodes_leave_work_nodes(self) -> Self:
        if self.spare_nodes >= self.nodes:
            raise ValueError(f"spare_nodes {self.spare_nodes} must be less than nodes {self.nodes}")
        return self
