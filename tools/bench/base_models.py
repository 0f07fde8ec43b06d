"""Measure how long engines wait for a base model on a shared filesystem of limited speed, with and without staging.

    python tools/bench/base_models.py --nodes 16 --engines-per-node 4 --out docs/measurements/base_models.json

Every simulated node is a process with its own folder, every engine a thread of it. All reads from the shared folder
share one rate (a token bucket in shared memory); chunks between nodes go through the real HTTPS servers on the
loopback. The machine has few cores, so the rate is chosen low enough that computing is not the limit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing as mp
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.base_models import staging
from primerl_hpc.transport.base_models.chunks import Chunk, list_chunks, read_chunk

MIB = 2**20


def make_model(folder: Path, size_mib: int) -> Path:
    """Create a snapshot of the hub cache with one large file."""
    data = os.urandom(MIB) * size_mib
    blob = folder / "blobs" / hashlib.sha256(data).hexdigest()
    blob.parent.mkdir(parents=True)
    blob.write_bytes(data)
    snapshot = folder / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to(blob)
    return snapshot


class SharedFilesystem:
    """A rate in bytes per second that all processes share, and the number of bytes that were read."""

    def __init__(self, rate: float) -> None:
        self.rate, self.free_at, self.num_bytes = rate, mp.Value("d", 0.0), mp.Value("q", 0)

    def read(self, folder: Path, chunk: Chunk) -> bytes:
        with self.free_at.get_lock():
            self.free_at.value = max(self.free_at.value, time.monotonic()) + chunk.length / self.rate
            ready = self.free_at.value
        with self.num_bytes.get_lock():
            self.num_bytes.value += chunk.length
        data = read_chunk(folder, chunk)
        time.sleep(max(0.0, ready - time.monotonic()))
        return data


def run_node(node: int, start: Callable[[int], None], engines: int, barrier: Any, seconds: Any) -> None:
    """Start all engines of a node at once; stay until every node has its model, because peers read from this one."""
    barrier.wait()
    begin = time.monotonic()
    threads = [threading.Thread(target=start, args=(node,)) for _ in range(engines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds[node] = time.monotonic() - begin
    barrier.wait()


def measure(
    model: Path, work: Path, nodes: int, engines: int, arguments: argparse.Namespace, staged: bool
) -> dict[str, Any]:
    """Return the time until the last engine has its model, and the bytes read from the shared folder."""
    shared = SharedFilesystem(arguments.rate_mib * MIB)
    run = RunDir(work / "run")
    run.control.mkdir(parents=True)
    keys = run_keys(run)
    chunk_bytes = arguments.chunk_kib * 1024
    staging.list_chunks = lambda folder: list_chunks(folder, chunk_bytes)
    staging.read_chunk = shared.read
    staging.LOOK_EVERY_S = 0.05

    def start(node: int) -> None:
        if staged:
            meeting = staging.Meeting(
                run.control / "peers", tuple(range(nodes)), node, "127.0.0.1", f"node-{node}", keys
            )
            staging.stage(model, work / f"node-{node}", meeting)
            return
        for chunk in list_chunks(model, chunk_bytes).chunks:
            shared.read(model, chunk)

    context = mp.get_context("fork")
    barrier, seconds = context.Barrier(nodes), context.Array("d", nodes)
    children = [
        context.Process(target=run_node, args=(node, start, engines, barrier, seconds))
        for node in range(nodes)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    return {
        "engines": nodes * engines,
        "seconds": round(max(seconds), 2),
        "shared_mib": shared.num_bytes.value / MIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--engines-per-node", type=int, default=4)
    parser.add_argument("--model-mib", type=int, default=32)
    parser.add_argument("--rate-mib", type=float, default=2.0, help="MiB per second of the shared filesystem")
    parser.add_argument("--chunk-kib", type=int, default=256)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", arguments.model_mib)
        cases = (
            ("one engine, shared folder", 1, 1, False),
            ("one engine, staged", 1, 1, True),
            ("all engines, staged", arguments.nodes, arguments.engines_per_node, True),
        )
        for name, nodes, engines, staged in cases:
            work = Path(folder) / f"case-{len(rows)}"
            work.mkdir()
            rows[name] = measure(model, work, nodes, engines, arguments, staged)
            print(name, rows[name], flush=True)
    ratio = rows["all engines, staged"]["seconds"] / rows["one engine, shared folder"]["seconds"]
    result = {
        "settings": {key: value for key, value in vars(arguments).items() if key != "out"},
        "machine": {"python": platform.python_version(), "cpus": os.cpu_count()},
        "rows": rows,
        "all / one": round(ratio, 2),
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
