"""The program on each node: connect to the others and, if requested, measure bandwidth; a task per node.

    srun … python -m primerl_hpc.runtime.job.network.probe FOLDER/network.json          # → FOLDER/network-<i>.json

Nodes exchange files in the folder of the request and wait for each other before each part. All-reduce is skipped if
two nodes cannot connect, because it would wait for its timeout.
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
from primerl_hpc.common.errors import PrimerlError
from primerl_hpc.common.files import read_json, read_json_or_none, write_json
from primerl_hpc.common.node.exiting import exit_process
from primerl_hpc.common.waiting import Polling
from primerl_hpc.run.ports import listen_host, set_collective_interfaces
from primerl_hpc.runtime.job.network.bandwidth import NUM_ELEMENTS, measure_pairs, read_file, write_file
from primerl_hpc.runtime.job.network.reach import Listener, connect_to
from primerl_hpc.runtime.job.node_checks import node_name
from primerl_hpc.runtime.job.sums import folder_store, result_file, wait_for_ranks

POLL_S = 0.05


def make_probe_request(
    *, nonce: str, has_bandwidth: bool, ranks_per_node: int, accelerator: str, timeout_s: float
) -> dict[str, Any]:
    """Return the request. ``timeout_s``: for each part, until the other nodes have reached it too."""
    shape = {"ranks_per_node": ranks_per_node, "accelerator": accelerator, "timeout_s": timeout_s}
    return {"nonce": nonce, "has_bandwidth": has_bandwidth, **shape}


class NodeExchange:
    """This node among those of the step; they exchange one file for each part."""

    def __init__(self, request: Path, timeout_s: float) -> None:
        self.request, self.timeout_s = request, timeout_s
        self.index, self.count = (
            env.integer("SLURM_PROCID", 0),
            env.integer("SLURM_NTASKS", 1),
        )

    def file(self, part: str, index: int) -> Path:
        return self.request.with_name(f"{self.request.stem}-{part}-{index}.json")

    def exchange(self, part: str, value: Any) -> list[Any]:
        """Write this node's value and return those of all nodes; None for a node that wrote none in time."""
        write_json(self.file(part, self.index), {"value": value})
        rows = Polling(self.timeout_s, POLL_S).last(lambda: self._rows(part), lambda rows: None not in rows)
        return [None if row is None else row["value"] for row in rows]

    def _rows(self, part: str) -> list[Any]:
        os.listdir(self.request.parent)  # refreshes the cache of a network filesystem
        return [read_json_or_none(self.file(part, index)) for index in range(self.count)]


def main(argv: list[str]) -> int:
    """Measure and write the result of this node; with ``RANK`` as second argument, run that rank."""
    path = Path(argv[0])
    request = read_json(path)
    if len(argv) > 1:
        _run_rank(path, request, int(argv[1]))
    peers, started = NodeExchange(path, request["timeout_s"]), time.monotonic()
    result: dict[str, Any] = {"node": node_name(), "nonce": request["nonce"], "error": ""}
    try:
        result |= _probe(peers, request)
    except (OSError, PrimerlError) as error:
        result["error"] = str(error)
    result["seconds"] = round(time.monotonic() - started, 2)
    write_json(result_file(path, peers.index), result)
    return 0


def _probe(peers: NodeExchange, request: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {"unreachable": {}, "read_gb_s": None, "pairs_gb_s": {}}
    with Listener(listen_host(peers.count)) as listener:
        known = peers.exchange("address", [node_name(), *listener.address])
        others = [row for index, row in enumerate(known) if row is not None and index != peers.index]
        own["address"] = listener.address[0]
        own["unreachable"] = connect_to({name: (host, port) for name, host, port in others})
        reached = peers.exchange("reach", own["unreachable"])
    if not request["has_bandwidth"]:
        return own
    data = peers.file("data", peers.index).with_suffix(".bin")
    try:
        sizes = peers.exchange("written", write_file(data))
        neighbor = (peers.index + 1) % peers.count
        if sizes[neighbor]:
            own["read_gb_s"] = read_file(peers.file("data", neighbor).with_suffix(".bin"))
        peers.exchange("read", True)
    finally:
        data.unlink(missing_ok=True)
    if any(failed is None or failed for failed in reached):
        return own | {"skipped": "nodes cannot connect"}
    names = [row[0] for row in known]
    error, pairs = _run_ranks(peers, request)
    return own | {"error": error, "pairs_gb_s": {names[int(peer)]: rate for peer, rate in pairs.items()}}


def _run_ranks(peers: NodeExchange, request: dict[str, Any]) -> tuple[str, dict[str, float]]:
    """Return (what failed, GB/s by index of the peer)."""
    local = request["ranks_per_node"]
    environment = os.environ | {"PROBE_NODES": str(peers.count)}
    first = peers.index * local
    command = [sys.executable, "-m", "primerl_hpc.runtime.job.network.probe", str(peers.request)]
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(first, first + local)]
    error = wait_for_ranks(ranks, request["timeout_s"])
    return error, read_json_or_none(peers.file("rank", first)) or {}


def _run_rank(path: Path, request: dict[str, Any], rank: int) -> NoReturn:
    import torch
    import torch.distributed as dist

    from primerl_hpc.transport.members import require_proofs

    num_nodes, local = int(os.environ["PROBE_NODES"]), request["ranks_per_node"]
    on_gpu = request["accelerator"] == "gpu"
    device = torch.device("cuda", rank % local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    set_collective_interfaces(num_nodes)
    store = folder_store(path.with_name(f"{path.stem}-store-{request['nonce']}"), request["timeout_s"])
    timeout = timedelta(seconds=request["timeout_s"])
    backend = "nccl" if on_gpu else "gloo"
    require_proofs()
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_nodes * local, timeout=timeout)
    size = NUM_ELEMENTS[request["accelerator"]]
    pairs = measure_pairs(num_nodes=num_nodes, local=local, device=device, num_elements=size)
    if rank % local == 0:
        write_json(path.with_name(f"{path.stem}-rank-{rank}.json"), pairs)
    dist.barrier()
    dist.destroy_process_group()
    exit_process()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
