"""Compare an all-reduce over all nodes with its known result, because a network can corrupt sums without an error.

    python -m primerl_hpc.runtime.job.sums CONTROL/preflight/sums.json   # a task per node, in the trainer's software

NCCL's protocol LL128 returned wrong sums between GH200 nodes (NVIDIA/nccl issue 2001, pull request 2053), from eight
nodes upward and only for some message sizes. So all ranks of the run sum tensors of several sizes, several times, and
compare every element. Element i of rank r is ``i % 251 + r``, so the sum over n ranks is ``n (i % 251) + n (n - 1)/2``,
which float32 represents exactly for up to 5,000 ranks.

Each task starts one process per GPU, or one without GPUs. They meet through files next to the request, which only the
run's owner can write. torch is imported by the ranks only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from primerl_hpc.common import env
from primerl_hpc.common.files import create_exclusive, read_json, read_json_or_none, write_bytes, write_json
from primerl_hpc.common.node.exiting import exit_process
from primerl_hpc.common.waiting import Polling

PERIOD = 251
NUM_ELEMENTS = {"gpu": (1 << 8, 1 << 14, 1 << 18, 1 << 22, 1 << 24), "cpu": (1 << 8, 1 << 16)}
"""Lengths of the float32 tensors: 1 KiB to 64 MiB."""
REPEATS = {"gpu": 20, "cpu": 2}
POLL_S = 0.02
WRONG_HINT = (
    "on GH200 nodes set NCCL_PROTO: ^LL128 in network.env; otherwise compare network.env with the site's "
    "documentation and report it to the site"
)


def make_sums_request(*, nonce: str, ranks_per_node: int, accelerator: str, timeout_s: int) -> dict[str, Any]:
    """Return the request. ``accelerator``: ``gpu`` (NCCL) or ``cpu`` (gloo)."""
    shape = {"num_elements": NUM_ELEMENTS[accelerator], "repeats": REPEATS[accelerator]}
    given = {"nonce": nonce, "ranks_per_node": ranks_per_node, "accelerator": accelerator}
    return {**given, **shape, "timeout_s": timeout_s}


def result_file(request: Path, node: int) -> Path:
    """Return the file with the result of a node, by its rank in the step."""
    return request.with_name(f"{request.stem}-{node}.json")


def judge_sums(results: list[dict[str, Any] | None]) -> tuple[str, str]:
    """Return (``ok`` | ``warn`` | ``bad``, message) for the results of all nodes; None for a node without one."""
    faults = [fault for result in results if result is not None for fault in result["wrong"]]
    if faults:
        hosts = sorted({result["node"] for result in results if result is not None and result["wrong"]})
        return "bad", f"wrong sums on {', '.join(hosts)}: {faults[0]}"
    errors = [f"{result['node']}: {result['error']}" for result in results if result and result["error"]]
    if errors:
        return "warn", f"the sums could not be checked: {errors[0]}"
    present = [result for result in results if result is not None]
    if missing := len(results) - len(present):
        return "warn", f"the sums could not be checked: {missing} of {len(results)} nodes did not respond"
    ranks, seconds = present[0]["ranks"], max(result["seconds"] for result in present)
    return "ok", f"sums over {ranks} ranks on {len(results)} nodes are right ({seconds:.1f} s)"


# -- on a node -------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Run the ranks of this node and write their result; with ``RANK`` as second argument, run that rank."""
    path = Path(argv[0])
    request = read_json(path)
    if len(argv) > 1:
        _run_rank(path, request, int(argv[1]))
    node, num_nodes = env.integer("SLURM_PROCID", 0), env.integer("SLURM_NTASKS", 1)
    local, started = request["ranks_per_node"], time.monotonic()
    environment = os.environ | {"SUMS_WORLD": str(local * num_nodes)}
    first = node * local
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "primerl_hpc.runtime.job.sums", str(path), str(rank)], env=environment
        )
        for rank in range(first, first + local)
    ]
    error = wait_for_ranks(ranks, request["timeout_s"])
    reports = [read_json_or_none(_rank_file(path, rank)) for rank in range(first, first + local)]
    wrong = [fault for report in reports if report is not None for fault in report["wrong"]]
    result = {
        "nonce": request["nonce"],
        "node": os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        "ranks": local * num_nodes,
        "wrong": wrong,
        "error": error,
        "seconds": round(time.monotonic() - started, 2),
    }
    write_json(result_file(path, node), result)
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


def _rank_file(request: Path, rank: int) -> Path:
    return request.with_name(f"{request.stem}-rank-{rank}.json")


def _run_rank(path: Path, request: dict[str, Any], rank: int) -> NoReturn:
    import torch
    import torch.distributed as dist

    from primerl_hpc.transport.members import require_proofs

    world, local = int(os.environ["SUMS_WORLD"]), rank % request["ranks_per_node"]
    on_gpu = request["accelerator"] == "gpu"
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=request["timeout_s"])
    store = folder_store(path.with_name(f"{path.stem}-store-{request['nonce']}"), request["timeout_s"])
    require_proofs()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world, timeout=timeout
    )
    wrong = check_sums(request["num_elements"], request["repeats"], rank=rank, world=world, device=device)
    write_json(_rank_file(path, rank), {"wrong": wrong})
    dist.barrier()
    dist.destroy_process_group()
    exit_process()


def check_sums(num_elements: list[int], repeats: int, *, rank: int, world: int, device: Any) -> list[str]:
    """All-reduce tensors over the default process group; return a description of each wrong sum. Collective."""
    import torch
    import torch.distributed as dist

    wrong = []
    for size in num_elements:
        pattern = torch.arange(size, device=device) % PERIOD
        values = (pattern + rank).to(torch.float32)
        expected = (world * pattern + world * (world - 1) // 2).to(torch.float32)
        most = 0
        for _ in range(repeats):  # as often on every rank, whatever one of them finds
            total = values.clone()
            dist.all_reduce(total)
            most = max(most, int((total != expected).sum()))
        if most:
            wrong.append(f"{most} of {size} elements (rank {rank} of {world})")
    return wrong


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
