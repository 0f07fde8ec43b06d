"""Which ranks do what together.

The trainer's ranks are cut twice. For dense weights and sequences, outermost first:

    replicate × data × context        weights are sharded over data × context, copied over replicate;
                                      a sequence is cut over context; rows are dealt to replicate × data

For the experts of a mixture of experts, the same data × context ranks:

    replicate × expert_shard × expert   expert e lives on one rank of ``expert``, its matrices cut over expert_shard

Innermost axes are neighbouring ranks, so that what talks most sits on one node. Axes need not divide each other across the
two cuts: experts may spread over fewer or more ranks than share a sequence.
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

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.plan.degrees import check_degrees
from primerl_hpc.recipe.layout_schema import TrainerLayout

MAX_AUTO_EXPERT_RANKS = 8  # all-to-all leaves a node's fast links beyond this


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
    def data_rank(self) -> int:
        """Which rows are this rank's; ranks that share a sequence have the same."""
        return self.rank // self.context_size

    @property
    def data_size(self) -> int:
        return self.size // self.context_size

    @property
    def is_counted(self) -> bool:
        """Whether this rank's rows count in sums over all ranks: one of those that share them."""
        return self.rank % self.context_size == 0


def make_world(
    layout: TrainerLayout,
    device: torch.device,
    *,
    local_rank: int,
    local_size: int,
    timeout: timedelta | None = None,
) -> World:
    """Meshes over the default process group. Raises ConfigError when the layout does not fit its ranks."""
    size = dist.get_world_size()
    check_degrees(layout, size)
    if layout.replicate == 1:
        mesh = make_mesh(device, (size,), ("shard",), timeout)
    else:
        shape = (layout.replicate, size // layout.replicate)
        mesh = make_mesh(device, shape, ("replicate", "shard"), timeout)
    context = None
    if (degree := context_degree(layout)) > 1:
        context = make_mesh(device, (size // degree, degree), ("data", "context"), timeout)["context"]
    return World(dist.get_rank(), size, local_rank, local_size, device, mesh, context, timeout)


def make_mesh(
    device: torch.device, shape: tuple[int, ...], names: tuple[str, ...], timeout: timedelta | None
) -> DeviceMesh:
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    if timeout is not None:
        for group in mesh.get_all_groups():  # torch gives new groups its default, not the default group's
            dist.distributed_c10d._set_pg_timeout(timeout, group)
    return mesh


def context_degree(layout: TrainerLayout) -> int:
    """The planner has settled ``auto`` where there is one; by hand it means 1."""
    return 1 if layout.context_parallel == "auto" else layout.context_parallel


def choose_expert_degree(layout: TrainerLayout, num_experts: int, *, shard: int, local: int) -> int:
    """Ranks that share the experts of a model with ``num_experts`` (0: dense).

    ``shard``: ranks that share one copy of the model; ``local``: ranks on a node.

    ``auto``: the largest number that divides experts and sharding ranks, at most a node's ranks and
    `MAX_AUTO_EXPERT_RANKS`. Raises ConfigError, with the numbers, where the asked degree does not fit the model.
    """
    asked = layout.expert_parallel
    if asked == "auto":
        most = min(shard, local, MAX_AUTO_EXPERT_RANKS, num_experts)
        return max((d for d in range(1, most + 1) if num_experts % d == 0 and shard % d == 0), default=1)
    if asked > 1 and num_experts == 0:
        raise ConfigError(
            f"layout.trainer.expert_parallel is {asked}, but the model has no experts",
            mend="set it to auto or 1",
        )
    if num_experts % asked:
        raise ConfigError(
            f"layout.trainer.expert_parallel {asked} does not divide the model's {num_experts} experts"
        )
    return asked


def make_expert_mesh(world: World, degree: int) -> DeviceMesh:
    """(replicate, expert_shard, expert), without replicate where there is one copy."""
    shape = (world.replicate, world.shard_mesh.size() // degree, degree)
    names = ("replicate", "expert_shard", "expert")
    start = 0 if world.replicate > 1 else 1
    return make_mesh(world.device, shape[start:], names[start:], world.timeout)


@contextmanager
def one_of_each_node_first(world: World) -> Iterator[None]:
    """What comes from the hub is fetched by one rank of each node; the others come after it and find it there."""
    if world.local_rank:
        dist.barrier()
    yield
    if not world.local_rank:
        dist.barrier()


def local(value: Tensor) -> Tensor:
    """What this rank holds of it."""
    return value.to_local() if isinstance(value, DTensor) else value
