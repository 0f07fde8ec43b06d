"""Meshes: the groups of ranks that work together.

The trainer's ranks are divided several times. For dense weights and sequences, outermost first:

    replicate × data × context × tensor   weights are sharded over data × context × tensor and copied over replicate;
                                          a sequence is split over context, and between divided matrices over tensor;
                                          rows are distributed over replicate × data

For the matrices that tensor parallelism divides, and for the experts of a mixture of experts, the same ranks:

    replicate × tensor_shard × tensor     rows or columns of a matrix are on one rank of ``tensor``, sharded over
                                          tensor_shard
    replicate × expert_shard × expert     expert e is on one rank of ``expert``, its matrices sharded over expert_shard

Innermost axes are adjacent ranks, so that ranks that communicate most share a node. The axes of the divisions need
not divide each other: experts may be distributed over fewer or more ranks than share a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.plan.degrees import check_degrees
from primerl_hpc.recipe.schema.layout import TrainerLayout

MAX_AUTO_EXPERT_RANKS = 8  # with more, the all-to-all leaves a node's fast links


@dataclass(frozen=True)
class World:
    """This process among the trainer's ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int  # ranks on this node
    device: torch.device
    mesh: DeviceMesh  # ("shard",), or ("replicate", "shard") with HSDP
    context_mesh: DeviceMesh | None = None  # ("context",): the ranks that share a sequence
    timeout: timedelta | None = None  # of a collective in any group; None: torch's own
    tensor_mesh: DeviceMesh | None = None  # ([replicate,] tensor_shard, tensor)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def shard_mesh(self) -> DeviceMesh:
        return self.mesh["shard"] if self.mesh.ndim > 1 else self.mesh

    @property
    def replicate(self) -> int:
        return self.size // self.shard_mesh.size()

    @property
    def context_size(self) -> int:
        return 1 if self.context_mesh is None else self.context_mesh.size()

    @property
    def tensor_size(self) -> int:
        return 1 if self.tensor_mesh is None else self.tensor_mesh["tensor"].size()

    @property
    def row_ranks(self) -> int:
        """Ranks that share rows."""
        return self.context_size * self.tensor_size

    @property
    def data_rank(self) -> int:
        """Index of this rank's share of the rows; ranks that share a sequence have the same."""
        return self.rank // self.row_ranks

    @property
    def data_size(self) -> int:
        return self.size // self.row_ranks

    @property
    def is_counted(self) -> bool:
        """True for one of the ranks that share rows: only its rows count in sums over all ranks."""
        return self.rank % self.row_ranks == 0


def make_world(
    layout: TrainerLayout,
    device: torch.device,
    *,
    local_rank: int,
    local_size: int,
    timeout: timedelta | None = None,
) -> World:
    """Return this rank's meshes over the default process group. Raises ConfigError if the layout does not fit."""
    size = dist.get_world_size()
    check_degrees(layout, size)
    if layout.num_replicas == 1:
        mesh = make_mesh(device, (size,), ("shard",), timeout)
    else:
        shape = (layout.num_replicas, size // layout.num_replicas)
        mesh = make_mesh(device, shape, ("replicate", "shard"), timeout)
    context = tensor_mesh = None
    degree, tensor = context_degree(layout), layout.tensor_degree
    if degree > 1:
        shape = (size // degree // tensor, degree, tensor)
        context = make_mesh(device, shape, ("data", "context", "tensor"), timeout)["context"]
    if tensor > 1:
        shape = (layout.num_replicas, size // layout.num_replicas // tensor, tensor)
        tensor_mesh = make_inner_mesh(device, shape, ("replicate", "tensor_shard", "tensor"), timeout)
    return World(dist.get_rank(), size, local_rank, local_size, device, mesh, context, timeout, tensor_mesh)


def make_mesh(
    device: torch.device, shape: tuple[int, ...], names: tuple[str, ...], timeout: timedelta | None
) -> DeviceMesh:
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    if timeout is not None:
        # torch gives new groups its own default timeout, not the default group's
        for group in mesh.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(timeout, group)
    return mesh


def context_degree(layout: TrainerLayout) -> int:
    """Return the ranks that share a sequence. The planner resolves ``auto``; without a plan it means 1."""
    return 1 if layout.context_parallel == "auto" else layout.context_parallel


def choose_expert_degree(layout: TrainerLayout, num_experts: int, *, shard: int, local: int) -> int:
    """Return the number of ranks that share the experts of a model with ``num_experts`` (0: dense).

    ``shard``: ranks that share one copy of the model; ``local``: ranks on a node.

    ``auto``: the largest number that divides experts and sharding ranks, at most a node's ranks and
    `MAX_AUTO_EXPERT_RANKS`. Raises ConfigError if the requested degree does not fit the model.
    """
    degree = layout.expert_parallel
    if degree == "auto":
        most = min(shard, local, MAX_AUTO_EXPERT_RANKS, num_experts)
        return max((d for d in range(1, most + 1) if num_experts % d == 0 and shard % d == 0), default=1)
    if degree > 1 and num_experts == 0:
        raise ConfigError(
            f"layout.trainer.expert_parallel is {degree}, but the model has no experts",
            hint="set it to auto or 1",
        )
    if num_experts % degree:
        raise ConfigError(
            f"layout.trainer.expert_parallel {degree} does not divide the model's {num_experts} experts"
        )
    return degree


def make_expert_mesh(world: World, degree: int) -> DeviceMesh:
    """Return the mesh (replicate, expert_shard, expert), without replicate if there is one copy of the model."""
    shape = (world.replicate, world.shard_mesh.size() // degree, degree)
    return make_inner_mesh(world.device, shape, ("replicate", "expert_shard", "expert"), world.timeout)


def make_inner_mesh(
    device: torch.device, shape: tuple[int, ...], names: tuple[str, ...], timeout: timedelta | None
) -> DeviceMesh:
    """Return a mesh without its first dim, the replicas, if there is one copy of the model."""
    start = 0 if shape[0] > 1 else 1
    return make_mesh(device, shape[start:], names[start:], timeout)


@contextmanager
def local_rank_zero_first(world: World) -> Iterator[None]:
    """Run the block on local rank 0 of each node first, so that the other ranks find what it put into the cache."""
    if world.local_rank:
        dist.barrier()
    yield
    if not world.local_rank:
        dist.barrier()


def to_local(value: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def local_slice(value: Tensor) -> tuple[slice, ...]:
    """Return the indices of this rank's part in the full tensor, one slice per dim."""
    if not isinstance(value, DTensor):
        return tuple(slice(0, size) for size in value.shape)
    shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
