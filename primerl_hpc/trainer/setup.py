"""Processes, device and mesh: the same code on CPUs with gloo and on GPUs with NCCL."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.schema import Recipe, TrainerLayout
from primerl_hpc.trainer.watchdog import record_collectives


@dataclass(frozen=True)
class World:
    """This process among the trainer's ranks."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh  # ("shard",), or ("replicate", "shard") with HSDP

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def shard_mesh(self) -> DeviceMesh:
        return self.mesh["shard"] if self.mesh.ndim > 1 else self.mesh


def start_world(recipe: Recipe) -> World:
    """Join the process group that torchrun's environment describes.

    Raises ConfigError when the layout does not fit the number of ranks.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    record_collectives()
    timeout = timedelta(seconds=recipe.timeouts.distributed_s)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timeout)
    mesh = make_mesh(recipe.layout.trainer, dist.get_world_size(), device.type)
    if recipe.trainer.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    return World(dist.get_rank(), dist.get_world_size(), local_rank, device, mesh)


def make_mesh(layout: TrainerLayout, world_size: int, device_type: str) -> DeviceMesh:
    check_layout(layout, world_size)
    if layout.replicate == 1:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    shape = (layout.replicate, world_size // layout.replicate)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


def check_layout(layout: TrainerLayout, world_size: int) -> None:
    if layout.context_parallel != 1:
        raise ConfigError(
            f"layout.trainer.context_parallel {layout.context_parallel} is not supported by this version",
            mend="set it to 1",
        )
    if layout.expert_parallel not in ("auto", 1):
        raise ConfigError(
            f"layout.trainer.expert_parallel {layout.expert_parallel} is not supported by this version",
            mend="set it to 1 or auto: experts are then sharded like all other weights",
        )
    if world_size % layout.replicate:
        raise ConfigError(
            f"layout.trainer.replicate {layout.replicate} does not divide the {world_size} trainer ranks"
        )


def seed_step(seed: int, step: int, rank: int) -> None:
    """Random state as a pure function of seed, step and rank: a checkpoint needs none, a resume repeats it."""
    value = int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0])
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def from_leader(value: Any) -> Any:
    """Rank 0's ``value`` (any small object) on all ranks."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def end_world() -> None:
    """Leave together: an interpreter that ends with a live gloo group aborts (exit -6) after good results."""
    dist.barrier()
    dist.destroy_process_group()
