"""Measure the network between the nodes of a step and their reads of shared files; find the slow nodes.

    srun … python -m primerl_hpc.checks.network FOLDER/network.json          # → FOLDER/network-<i>.json

Without bandwidth, nodes only connect to each other, which takes a second and needs no torch. With it, the measurement
takes less than 30 s for any number of nodes: each node all-reduces with up to three others (`ranks`). Nodes exchange
files in the folder of the request and wait for each other before each part. All-reduce is skipped if two nodes cannot
connect, because it would wait for its timeout.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

from primerl_hpc.checks.findings import Finding, judged
from primerl_hpc.checks.node import node_name
from primerl_hpc.checks.ranks import NodeTask, run_task
from primerl_hpc.common.files import read_json_or_none, write_json
from primerl_hpc.common.waiting import Polling
from primerl_hpc.run.ports import listen_host

MODULE = "primerl_hpc.checks.network"
POLL_S = 0.05
LIMIT_S = 5.0
"""Time limit of a connection: a firewall that drops packets answers nothing."""
GREETING = b"primerl"
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
LEAST_SHARE = 0.7
"""A node with a smaller share of the median bandwidth is slow."""

# -- what the results mean -------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """GB/s by node of one measurement; None for a node without a rate."""

    name: str
    by_node: dict[str, float | None]

    @property
    def known(self) -> dict[str, float]:
        return {node: rate for node, rate in self.by_node.items() if rate is not None}

    def finding(self, reason: str) -> Finding:
        """Return the line of `doctor`; ``reason``: why a rate is missing."""
        what, known = f"nodes: {self.name}", self.known
        if not known or len(known) < len(self.by_node):
            return judged(False, f"not measured: {reason}", "see the messages of the nodes", what)
        facts = f"median {median(known.values()):.3g} GB/s of {len(known)} nodes"
        if not (slow := slow_nodes(known)):
            message = f"{facts}, {min(known.values()):.3g} to {max(known.values()):.3g}"
            return judged(True, message, check=what)
        shares = [f"{node} {known[node]:.3g} GB/s ({share:.0%})" for node, share in sorted(slow.items())]
        hint = f"exclude it: --profile-set scheduler.exclude={','.join(sorted(slow))}; report it to the site"
        message = f"less than {LEAST_SHARE:.0%} of the {facts}: {', '.join(shares)}"
        return judged(False, message, hint, what)


def rates_of(results: Sequence[dict[str, Any]]) -> tuple[Rates, Rates]:
    """Return the rates of file reads and of the best all-reduce of each node."""
    reads = {row["node"]: row.get("read_gb_s") for row in results}
    pairs = {row["node"]: max(row.get("pairs_gb_s", {}).values(), default=None) for row in results}
    return Rates("file reads", reads), Rates("all-reduce", pairs)


def judge_network(
    results: Sequence[dict[str, Any]], num_nodes: int, output: str, *, has_bandwidth: bool
) -> list[Finding]:
    """Return the lines of `doctor`: connections, and the rates if they were requested. ``output`` of the step."""
    findings = [judge_connections(results, num_nodes, output)]
    if has_bandwidth:
        reasons = [f"{row['node']}: {row['error'] or row['skipped']}" for row in results if _has_reason(row)]
        reason = next(iter(reasons), "a node did not respond")
        findings += [rates.finding(reason) for rates in rates_of(results)]
    return findings


@dataclass(frozen=True)
class SlowNodes:
    slow: dict[str, str]
    """Slow host → its rate."""
    message: str
    """The rates, or why there are none."""


def judge_nodes(results: Sequence[dict[str, Any]], num_nodes: int) -> SlowNodes:
    """Judge the nodes of an attempt. Nothing is slow if a rate is missing: a run can start without this measurement."""
    slow, facts = dict[str, str](), []
    for rates in reversed(rates_of(results)):
        what, known = rates.name, rates.known
        if len(known) < num_nodes:
            facts.append(f"{what}: {len(known)} of {num_nodes} nodes have a rate")
            continue
        facts.append(f"{what}: {min(known.values()):.3g} to {max(known.values()):.3g} GB/s")
        for host, share in slow_nodes(known).items():
            slow.setdefault(host, f"{what} {known[host]:.3g} GB/s, {share:.0%} of the median")
    return SlowNodes(slow, "; ".join(facts))


def judge_connections(results: Sequence[dict[str, Any]], num_nodes: int, output: str) -> Finding:
    """``output``: what the step printed."""
    what = "nodes: connections"
    hint = "a firewall between the nodes, or network.interface of the profile is not their common network"
    failed = [
        f"{row['node']} cannot connect to {peer} ({reason})"
        for row in results
        for peer, reason in row.get("unreachable", {}).items()
    ]
    if failed:
        more = f", and {len(failed) - 1} other pairs" if len(failed) > 1 else ""
        return judged(False, failed[0] + more, hint, what, "\n".join(failed[1:]))
    errors = [f"{row['node']}: {row['error']}" for row in results if "address" not in row]
    if errors or len(results) < num_nodes:
        last = "".join(output.strip().splitlines()[-1:])
        message = errors[0] if errors else f"{len(results)} of {num_nodes} nodes responded: {last}"
        return judged(False, message, hint, what)
    addresses = ", ".join(sorted(row["address"] for row in results)[:3])
    return judged(True, f"{num_nodes} nodes connect to each other ({addresses}, …)", check=what)


def _has_reason(row: Mapping[str, Any]) -> bool:
    return bool(row["error"] or row.get("skipped"))


# -- the choice of pairs and of slow nodes: pure ---------------------------------------------------


def rounds_of(num_nodes: int, limit: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs by the circle method: over all rounds, every node meets every other one once.

    With an odd number of nodes, one of them rests in each round. At most ``limit`` rounds.
    """
    places: list[int | None] = [*range(num_nodes)]
    if num_nodes % 2:
        places.append(None)
    rounds = []
    for _ in range(min(limit, len(places) - 1)):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def slow_nodes(values: Mapping[str, float]) -> dict[str, float]:
    """Return the nodes below `LEAST_SHARE` of the median, with their share. ``values``: the best of each node.

    A node's best pair counts, so that the partners of a slow node are not slow themselves.
    """
    if not values or (middle := median(values.values())) <= 0:
        return {}
    return {node: value / middle for node, value in values.items() if value < LEAST_SHARE * middle}


# -- connections -----------------------------------------------------------------------------------


class Listener:
    """Accepts connections on a free port and greets each of them, in a thread."""

    def __init__(self, host: str) -> None:
        self.socket = socket.create_server((host, 0), backlog=1024)
        self.address: tuple[str, int] = self.socket.getsockname()[:2]
        self._thread = threading.Thread(target=self._serve, name="listener", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # ends accept
        self.socket.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.sendall(GREETING)


def connect_to(addresses: Mapping[str, tuple[str, int]], limit_s: float = LIMIT_S) -> dict[str, str]:
    """Return the nodes that cannot be reached, with the reason."""
    if not addresses:
        return {}
    with ThreadPoolExecutor(min(64, len(addresses))) as pool:
        reasons = pool.map(lambda address: _try(address, limit_s), addresses.values())
        return {
            node: f"{':'.join(map(str, addresses[node]))}: {reason}"
            for node, reason in zip(addresses, reasons, strict=True)
            if reason
        }


def _try(address: tuple[str, int], limit_s: float) -> str:
    try:
        with socket.create_connection(address, timeout=limit_s) as connection:
            return "" if connection.recv(len(GREETING)) == GREETING else "another program answers there"
    except OSError as error:
        return error.strerror or str(error)


# -- bandwidth -------------------------------------------------------------------------------------


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


# -- on a node -------------------------------------------------------------------------------------


class NodeExchange:
    """This node among those of the step; they exchange one file for each part."""

    def __init__(self, task: NodeTask) -> None:
        self.task = task

    def file(self, part: str, index: int) -> Path:
        return self.task.path.with_name(f"{self.task.path.stem}-{part}-{index}.json")

    def exchange(self, part: str, value: Any) -> list[Any]:
        """Write this node's value and return those of all nodes; None for a node that wrote none in time."""
        write_json(self.file(part, self.task.index), {"value": value})
        polling = Polling(self.task.request["timeout_s"], POLL_S)
        rows = polling.last(lambda: self._rows(part), lambda rows: None not in rows)
        return [None if row is None else row["value"] for row in rows]

    def _rows(self, part: str) -> list[Any]:
        os.listdir(self.task.path.parent)  # refreshes the cache of a network filesystem
        return [read_json_or_none(self.file(part, index)) for index in range(self.task.num_nodes)]


def main(argv: list[str]) -> int:
    return run_task(argv, _on_node, _on_rank)


def _on_node(task: NodeTask) -> dict[str, Any]:
    peers, own = NodeExchange(task), dict[str, Any]()
    with Listener(listen_host(task.num_nodes)) as listener:
        known = peers.exchange("address", [node_name(), *listener.address])
        others = [row for index, row in enumerate(known) if row is not None and index != task.index]
        own["address"] = listener.address[0]
        own["unreachable"] = connect_to({name: (host, port) for name, host, port in others})
        reached = peers.exchange("reach", own["unreachable"])
    if not task.request["has_bandwidth"]:
        return own
    own |= {"read_gb_s": None, "pairs_gb_s": {}}
    data = peers.file("data", task.index).with_suffix(".bin")
    try:
        sizes = peers.exchange("written", write_file(data))
        neighbor = (task.index + 1) % task.num_nodes
        if sizes[neighbor]:
            own["read_gb_s"] = read_file(peers.file("data", neighbor).with_suffix(".bin"))
        peers.exchange("read", True)
    finally:
        data.unlink(missing_ok=True)
    if any(failed is None or failed for failed in reached):
        return own | {"skipped": "nodes cannot connect"}
    names = [row[0] for row in known]
    error, (first, *_) = task.run_ranks(MODULE)
    return own | {
        "error": error,
        "pairs_gb_s": {names[int(peer)]: rate for peer, rate in (first or {}).items()},
    }


def _on_rank(task: NodeTask, device: Any) -> dict[int, float]:
    size = NUM_ELEMENTS[task.request["accelerator"]]
    return measure_pairs(
        num_nodes=task.num_nodes, local=task.ranks_per_node, device=device, num_elements=size
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
