"""Bandwidth of this node: reading files that another node wrote, and all-reduce with some of the other nodes.

Each measurement is limited in time, so that a slow node is found as fast as a fast one. torch is imported by the ranks
only.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from primerl_hpc.runtime.job.network.schedule import rounds_of

BLOCK = 8 << 20
FILE_BYTES = 256 << 20
FILE_S = 3.0
"""Time limits of writing and of reading."""
ROUNDS = 3
NUM_ELEMENTS = {"gpu": 1 << 26, "cpu": 1 << 20}
"""Length of the float32 tensor: 256 MiB, and 4 MiB."""
MEASURE_S = 1.0
"""Duration of the all-reduces of one pair."""
MAX_REPEATS = 20


def write_file(path: Path) -> int:
    """Write a file of random blocks until it is complete or the time is over; return its size."""
    block, size, deadline = os.urandom(BLOCK), 0, time.monotonic() + FILE_S
    with path.open("wb") as file:
        while size < FILE_BYTES and time.monotonic() < deadline:
            size += file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return size


def read_file(path: Path) -> float:
    """Return the rate of reading a file of another node, in GB/s."""
    size, started = 0, time.monotonic()
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while (part := file.read(BLOCK)) and time.monotonic() - started < FILE_S:
            size += len(part)
    return size / max(time.monotonic() - started, 1e-9) / 1e9


def measure_pairs(*, num_nodes: int, local: int, device: Any, num_elements: int) -> dict[int, float]:
    """All-reduce over the ranks of two nodes at a time; return peer → GB/s of this node. Collective over all ranks.

    The rate is the bus bandwidth of NCCL's tests, 2 (n - 1) / n · bytes / time, of the fastest repetition.
    """
    import torch
    import torch.distributed as dist

    tensor, found = torch.zeros(num_elements, device=device), dict[int, float]()
    node = dist.get_rank() // local
    for pairs in rounds_of(num_nodes, ROUNDS):
        ranks = [[place * local + rank for place in pair for rank in range(local)] for pair in pairs]
        group, _ = dist.new_subgroups_by_enumeration(ranks)
        pair = next((pair for pair in pairs if node in pair), None)
        if pair is not None:
            size = 2 * local
            seconds = _fastest(tensor, group, device)
            rate = 2 * (size - 1) / size * tensor.numel() * tensor.element_size() / seconds
            found[pair[0] + pair[1] - node] = rate / 1e9
        dist.barrier()
    return found


def _fastest(tensor: Any, group: Any, device: Any) -> float:
    """Return the duration of the fastest of several all-reduces in seconds; the first one also connects the ranks."""
    import torch
    import torch.distributed as dist

    def once() -> float:
        started = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    once()
    durations = [once()]
    longest = torch.tensor([durations[0]], device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)  # all ranks repeat as often
    repeats = min(MAX_REPEATS, int(MEASURE_S / max(float(longest), 1e-6)))
    durations += [once() for _ in range(repeats)]
    return min(durations)
