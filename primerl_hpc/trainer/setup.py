"""Process group and device: the same code on CPUs with gloo and on GPUs with NCCL."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from primerl_hpc.common import env
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer.parallel.mesh import World, make_world
from primerl_hpc.trainer.watchdog import record_collectives
from primerl_hpc.transport.members import require_proofs
from primerl_hpc.transport.store import SecureStore

CONTEXT_BYTES = 1 << 30
"""Memory of a GPU that this process uses outside torch's allocator: CUDA's context, cuBLAS, NCCL."""


def start_world(recipe: Recipe) -> World:
    """Join the process group: at the store of this rank's agent (`trainer.torchrun`), else by torch's own variables.

    The latter is for benchmarks, whose ranks exchange values in their main thread only: torch's TCPStore serves one
    request of a process at a time, so that a thread that waits for a value would block another that sets it.

    Raises ConfigError if the layout does not fit the number of ranks.
    """
    torch.set_num_threads(env.num_threads())
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        limit_memory(recipe, device)
    record_collectives()
    require_proofs()
    timeout = timedelta(seconds=recipe.timeouts.distributed_s)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    address, run_dir = env.store(), env.run_dir()
    if address is None or run_dir is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        keys = run_keys(RunDir(run_dir))
        store = SecureStore(keys, *address, timeout_s=recipe.timeouts.distributed_s)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        ranks = dist.PrefixStore("ranks", store)
        dist.init_process_group(backend, store=ranks, rank=rank, world_size=size, timeout=timeout)
    if recipe.trainer.deterministic:
        use_deterministic_algorithms()
    return make_world(
        recipe.layout.trainer,
        device,
        local_rank=local_rank,
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        timeout=timeout,
    )


def use_deterministic_algorithms() -> None:
    """Let torch choose deterministic kernels only. Uninitialized memory stays as it is: no result depends on it."""
    torch.use_deterministic_algorithms(True)
    options: Any = torch.utils.deterministic  # the option is a property of the module's type
    options.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False


def limit_memory(recipe: Recipe, device: torch.device) -> None:
    """Limit torch's allocator to the trainer's share of a GPU (``layout.colocated`` in mode ``share``)."""
    colocated = recipe.layout.colocated
    if colocated is None or colocated.mode != "share":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(1 - colocated.engine_share - CONTEXT_BYTES / total, device)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed all generators by a pure function of seed, step and rank, so that a checkpoint needs no random state."""
    value = int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0])
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def broadcast_from_rank0(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return rank 0's ``value`` (small, JSON) on all ranks. ``group``: another group of all ranks. Collective.

    The value crosses as JSON in the group's store, because torch's collectives of objects unpickle what a peer sends.
    """
    if dist.get_world_size() == 1:
        return json.loads(json.dumps(value))
    store, key = _next_key(group)
    if dist.get_rank() == 0:
        text = json.dumps(value)
        store.set(key, text)
        return json.loads(text)
    value = json.loads(store.get(key))
    if store.add(f"{key}/read", 1) == dist.get_world_size() - 1:
        store.delete_key(key)
        store.delete_key(f"{key}/read")
    return value


def gather_to_rank0(value: Any) -> list[Any]:
    """Return all ranks' ``value`` (small, JSON) on rank 0, an empty list on other ranks. Collective."""
    store, key = _next_key(None)
    text = json.dumps(value)
    if dist.get_rank() != 0:
        store.set(f"{key}/{dist.get_rank()}", text)
        return []
    values = [json.loads(text)]
    for rank in range(1, dist.get_world_size()):
        values.append(json.loads(store.get(f"{key}/{rank}")))
        store.delete_key(f"{key}/{rank}")
    return values


_stores: WeakKeyDictionary[dist.ProcessGroup, tuple[dist.Store, Iterator[int]]] = WeakKeyDictionary()
"""For each group, its store and the numbers of its next values. All ranks exchange the same values in one order."""


def _next_key(group: dist.ProcessGroup | None) -> tuple[dist.Store, str]:
    """Return the group's store and the key of its next value."""
    group = group or dist.distributed_c10d._get_default_group()
    if group not in _stores:
        _, store = dist.distributed_c10d._world.pg_map[group]
        assert store is not None  # only ranks outside of a group have none
        _stores[group] = dist.PrefixStore("objects", store), itertools.count()
    store, numbers = _stores[group]
    return store, str(next(numbers))


def all_gather_bytes(data: bytes) -> list[bytes]:
    """Return the ``data`` of each rank. Collective, over the network of the ranks: for data too large for the store."""
    size = dist.get_world_size()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)]))
    padded = torch.zeros(max(1, *(int(length) for length in lengths)), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded)
    return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]


def end_world() -> None:
    """Destroy the process group on all ranks: a process that exits with a live gloo group aborts with signal 6."""
    dist.barrier()
    dist.destroy_process_group()
