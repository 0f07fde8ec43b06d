"""A measurement with torch.distributed over all nodes of a step: a task on each node starts one process per device.

    python -m primerl_hpc.checks.sums FOLDER/sums.json          # → FOLDER/sums-<i>.json for task i, in each task
    python -m primerl_hpc.checks.sums FOLDER/sums.json 5        # rank 5, started by its task

Ranks meet through files next to the request, which only the run's owner can write. torch is imported by them only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from primerl_hpc.checks.node import node_name
from primerl_hpc.common import env
from primerl_hpc.common.errors import PrimerlError
from primerl_hpc.common.files import create_exclusive, read_json, read_json_or_none, write_bytes, write_json
from primerl_hpc.common.node.exiting import exit_process
from primerl_hpc.common.waiting import Polling
from primerl_hpc.run.ports import set_collective_interfaces

if TYPE_CHECKING:
    from primerl_hpc.plan.plan import SumsPlan

POLL_S = 0.02


def make_request(wants: SumsPlan, nonce: str) -> dict[str, Any]:
    """Return what every measurement needs to know: ``accelerator`` is ``gpu`` (NCCL) or ``cpu`` (gloo)."""
    shape = {"ranks_per_node": wants.ranks_per_node, "accelerator": wants.accelerator}
    return {"nonce": nonce, "timeout_s": wants.timeout_s, **shape}


def store_folder(request: Path, nonce: str) -> Path:
    """Return the folder in which ranks meet."""
    return request.with_name(f"{request.stem}-store-{nonce}")


def result_file(request: Path, node: int) -> Path:
    """Return the file with the result of a node, by its rank in the step."""
    return request.with_name(f"{request.stem}-{node}.json")


def read_results(request: Path, num_nodes: int, nonce: str) -> list[dict[str, Any] | None]:
    """Return the result of each node; None for one that did not answer this request."""
    found = [read_json_or_none(result_file(request, node)) for node in range(num_nodes)]
    return [result if result and result["nonce"] == nonce else None for result in found]


@dataclass(frozen=True)
class NodeTask:
    """The task of this node in the step."""

    path: Path
    request: dict[str, Any]
    index: int
    num_nodes: int

    @classmethod
    def of(cls, path: Path) -> NodeTask:
        nodes = env.integer("SLURM_PROCID", 0), env.integer("SLURM_NTASKS", 1)
        return cls(path, read_json(path), *nodes)

    @property
    def ranks_per_node(self) -> int:
        return self.request["ranks_per_node"]

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def rank_file(self, rank: int) -> Path:
        return self.path.with_name(f"{self.path.stem}-rank-{rank}.json")

    def run_ranks(self, module: str) -> tuple[str, list[Any]]:
        """Run the ranks of this node; return (what failed, what each of them has reported)."""
        first = self.index * self.ranks_per_node
        numbers = range(first, first + self.ranks_per_node)
        command = [sys.executable, "-m", module, str(self.path)]
        error = wait_for_ranks(
            [subprocess.Popen([*command, str(rank)]) for rank in numbers], self.request["timeout_s"]
        )
        return error, [read_json_or_none(self.rank_file(rank)) for rank in numbers]


def run_task(
    argv: list[str], on_node: Callable[[NodeTask], dict[str, Any]], on_rank: Callable[[NodeTask, Any], Any]
) -> int:
    """Write the result of this node. With a rank as second argument: run it on its device, and write its report."""
    task, started = NodeTask.of(Path(argv[0])), time.monotonic()
    if len(argv) > 1:
        _run_rank(task, int(argv[1]), on_rank)
    result: dict[str, Any] = {"node": node_name(), "nonce": task.request["nonce"], "error": ""}
    try:
        result |= on_node(task)
    except (OSError, PrimerlError) as error:
        result["error"] = str(error)
    result["seconds"] = round(time.monotonic() - started, 2)
    write_json(result_file(task.path, task.index), result)
    return 0


def wait_for_ranks(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> str:
    """Wait for the ranks of this node; return what failed, empty on success."""
    deadline, error = time.monotonic() + timeout_s, ""
    for rank in ranks:
        try:
            code = rank.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            error = error or f"no result within {timeout_s} s"
            rank.kill()
            code = rank.wait()
        if code and not error:
            error = f"a rank exited with {code}"
    return error


def _run_rank(task: NodeTask, rank: int, on_rank: Callable[[NodeTask, Any], Any]) -> NoReturn:
    import torch
    import torch.distributed as dist

    from primerl_hpc.transport.members import require_proofs

    request, on_gpu = task.request, task.request["accelerator"] == "gpu"
    device = torch.device("cuda", rank % task.ranks_per_node) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=request["timeout_s"])
    set_collective_interfaces(task.num_nodes)
    store = folder_store(store_folder(task.path, request["nonce"]), request["timeout_s"])
    require_proofs()
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=task.num_ranks, timeout=timeout)
    write_json(task.rank_file(rank), on_rank(task, device))
    dist.barrier()
    dist.destroy_process_group()
    exit_process()


def folder_store(folder: Path, timeout_s: float) -> Any:
    """Return a torch store whose values are files in a folder that all nodes share."""
    from torch.distributed import Store

    class FolderStore(Store):
        def __init__(self) -> None:
            super().__init__()
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

        def _file(self, key: str) -> Path:
            return folder / key.encode().hex()[-200:]

        def set(self, key: str, value: bytes | str) -> None:
            write_bytes(self._file(key), value.encode() if isinstance(value, str) else value)

        def get(self, key: str) -> bytes:
            self.wait([key])
            return self._file(key).read_bytes()

        def check(self, keys: list[str]) -> bool:
            return all(self._file(key).exists() for key in keys)

        def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=timeout_s)) -> None:
            for _ in Polling(timeout.total_seconds(), POLL_S):
                if self.check(keys):
                    return
                os.listdir(folder)  # refreshes the cache of a network filesystem
            raise RuntimeError(f"no {keys} within {timeout.total_seconds():.0f} s")

        def add(self, key: str, amount: int) -> int:
            number = 1
            while not create_exclusive(folder / f"{self._file(key).name}.{number}", str(amount)):
                number += 1
            files = [folder / f"{self._file(key).name}.{index}" for index in range(1, number + 1)]
            total = sum(int(file.read_text()) for file in files)
            self.set(key, str(total))
            return total

        def delete_key(self, key: str) -> bool:
            existed = self._file(key).exists()
            self._file(key).unlink(missing_ok=True)
            return existed

        def set_timeout(self, timeout: timedelta) -> None:
            pass

        def num_keys(self) -> int:
            return len(os.listdir(folder))

    store = FolderStore()
    _ALIVE.append(store)
    return store


_ALIVE: list[Any] = []
"""A process group references only the C++ object of a store."""
