"""Processes and device: the same code on CPUs with gloo and on GPUs with NCCL."""

from __future__ import annotations

import os
import random
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from primerl_hpc.recipe.schema import Recipe
from primerl_hpc.trainer.parallel.mesh import World, make_world
from primerl_hpc.trainer.watchdog import record_collectives


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
    if recipe.trainer.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    return make_world(
        recipe.layout.trainer,
        device,
        local_rank=local_rank,
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        timeout=timeout,
    )


def seed_step(seed: int, step: int, rank: int) -> None:
    """Random state as a pure function of seed, step and rank: a checkpoint needs none, a resume repeats it."""
    value = int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0])
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def from_leader(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's ``value`` (any small object) on all ranks; ``group``: of all ranks too."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
    return box[0]


def end_world() -> None:
    """Leave together: an interpreter that ends with a live gloo group aborts (exit -6) after good results."""
    dist.barrier()
    dist.destroy_process_group()
