"""Measure a node for the planner: ``python -m primerl_hpc.roles.calibrate FOLDER``.

Reads FOLDER/request.json, prints a line of progress for each measurement to stderr, and writes FOLDER/result.json: the
device, the versions, and one entry with its median duration for each matrix product, copy in device memory, collective
operation within the node and write to FOLDER. GPUs and CPUs are measured by the same code with different sizes.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from primerl_hpc.common.files import read_json, write_json
from primerl_hpc.common.node.exiting import exit_process
from primerl_hpc.transport.members import require_proofs

MIB = 2**20
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {
        "rows": (1, 16, 256, 2048, 8192, 32768),
        "widths": (2048, 4096, 8192),
        "copies": (256 * MIB, 1024 * MIB, 4096 * MIB),
        "messages": (1 * MIB, 64 * MIB, 512 * MIB),
    },
    "cpu": {
        "rows": (1, 8, 64, 256, 512, 1024),
        "widths": (256, 512, 1024),
        "copies": (4 * MIB, 32 * MIB, 128 * MIB),
        "messages": (1 * MIB, 4 * MIB, 16 * MIB),
    },
}
"""Rows and widths of matrix products; bytes of copies and messages."""
MIN_REPEATS, MAX_REPEATS = 3, 200


def measure(call: Callable[[], object], device: str, budget_s: float) -> float:
    """Return the median duration in seconds of ``call``, repeated for ``budget_s`` after one warm-up."""
    durations: list[float] = []
    call()
    end = time.perf_counter() + budget_s
    while len(durations) < MIN_REPEATS or (time.perf_counter() < end and len(durations) < MAX_REPEATS):
        durations.append(measure_once(call, device))
    return statistics.median(durations)


def measure_once(call: Callable[[], object], device: str) -> float:
    """Return the duration of one call in seconds."""
    _synchronize(device)
    start = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def gemms(device: str, budget_s: float) -> Iterator[dict[str, Any]]:
    """Yield the matrix products ``[rows, width] × [width, width]``: bfloat16 on GPUs, float32 on CPUs."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for width in SIZES[device]["widths"]:
        weights = torch.randn(width, width, device=device, dtype=torch.float32).to(dtype)
        for rows in SIZES[device]["rows"]:
            left = torch.randn(rows, width, device=device, dtype=torch.float32).to(dtype)
            out = torch.empty(rows, width, device=device, dtype=dtype)

            def multiply(left: Any = left, weights: Any = weights, out: Any = out) -> object:
                return torch.mm(left, weights, out=out)

            shape = {"rows": rows, "width": width, "dtype": str(dtype).removeprefix("torch.")}
            yield {"figure": "hardware.gemm", "seconds": measure(multiply, device, budget_s), **shape}


def copies(device: str, budget_s: float) -> Iterator[dict[str, Any]]:
    """Yield copies within the memory of the device."""
    for size in SIZES[device]["copies"]:
        source = torch.zeros(size, device=device, dtype=torch.uint8)
        target = torch.empty_like(source)

        def copy(source: Any = source, target: Any = target) -> object:
            return target.copy_(source)

        yield {"figure": "hardware.copy", "seconds": measure(copy, device, budget_s), "bytes": size}


def collectives(device: str, ranks: int, folder: Path, budget_s: float) -> Iterator[dict[str, Any]]:
    """Yield all-gather and all-reduce over ``ranks`` processes of this node; nothing for one rank."""
    if ranks < 2:
        return
    result = folder / "collectives.json"
    mp.spawn(_collective_rank, args=(device, ranks, str(folder), budget_s), nprocs=ranks)
    yield from read_json(result)


def _collective_rank(rank: int, device: str, ranks: int, folder: str, budget_s: float) -> None:
    """Measure as one rank. All ranks do the same number of repeats, because they wait for each other."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    backend = "nccl" if device == "cuda" else "gloo"
    require_proofs()
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    # torch 2.13 renamed the function
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    found = []
    for size in SIZES[device]["messages"]:
        whole = torch.zeros(size // 4, device=device, dtype=torch.float32)
        part = whole[: len(whole) // ranks].clone()
        gathered = torch.empty(len(part) * ranks, device=device, dtype=torch.float32)
        calls: dict[str, Callable[[], object]] = {
            "hardware.all_gather": lambda gathered=gathered, part=part: all_gather(gathered, part),
            "hardware.all_reduce": lambda whole=whole: dist.all_reduce(whole),
        }
        for figure, call in calls.items():
            # all ranks take the number of repeats from rank 0
            wanted = int(budget_s / measure(call, device, 0.0))
            repeats = torch.tensor([min(max(MIN_REPEATS, wanted), MAX_REPEATS)], device=device)
            dist.broadcast(repeats, 0)
            durations = [measure_once(call, device) for _ in range(int(repeats.item()))]
            found.append(
                {"figure": figure, "seconds": statistics.median(durations), "bytes": size, "ranks": ranks}
            )
    if rank == 0:
        write_json(Path(folder) / "collectives.json", found)
    dist.barrier()
    dist.destroy_process_group()
    exit_process()


def file_write(folder: Path, size: int) -> Iterator[dict[str, Any]]:
    """Yield the write of one file with fsync."""
    path, block = folder / "written.bin", os.urandom(8 * MIB)
    start = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(size // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    yield {"figure": "hardware.file_write", "seconds": seconds, "bytes": size // len(block) * len(block)}


def main(argv: list[str]) -> int:
    folder = Path(argv[1])
    request = read_json(folder / "request.json")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if request["gpus"] and device == "cpu":
        print("error: torch finds no GPU on this node", file=sys.stderr)
        return 1
    num_items = sum(len(SIZES[device][key]) for key in ("copies", "messages", "messages"))
    num_items += len(SIZES[device]["rows"]) * len(SIZES[device]["widths"])
    budget_s = request["seconds"] / (num_items + 1)
    ranks = torch.cuda.device_count() if device == "cuda" else request["cpu_ranks"]
    rows = []
    parts = (
        gemms(device, budget_s),
        copies(device, budget_s),
        collectives(device, ranks, folder, budget_s),
        file_write(folder, request["file_bytes"]),
    )
    for part in parts:
        for row in part:
            rows.append(row)
            shape = ", ".join(
                f"{name} {value}" for name, value in row.items() if name not in ("figure", "seconds")
            )
            print(f"{row['figure']}: {row['seconds']:.3g} s ({shape})", file=sys.stderr, flush=True)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    result = {"device": name, "node": os.uname().nodename, "torch": torch.__version__, "rows": rows}
    write_json(folder / "result.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
