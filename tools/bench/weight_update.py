#!/usr/bin/env python3
"""What an update of the engines' weights costs by transport: seconds at both ends and bytes through the shared folder, in one run.

    tools/bench/weight_update.py                        # the shape of Qwen3-0.6B with 8 layers, written as bfloat16
    tools/bench/weight_update.py --rate 3e-6            # steps of another size
    tools/bench/weight_update.py --folder /lustre/me    # the shared folder is there; the engine's copy stays in TMPDIR

Before every turn all weights move as AdamW moves them: by the rate, up or down, or less. Then each transport publishes the
same version as the trainer does, and an engine's worker (of a broadcast: in a process of its own) checks it and has every tensor; what
comes after, vLLM's own loading, is the same for all. Ratios are of one turn.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from machine import ROOT, describe_machine
from weight_write import QWEN3_600M, build

sys.path.insert(0, str(ROOT))


@dataclass
class Measured:
    publish_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    """Bytes in the shared folder, which the engine reads again; of a broadcast, those that were sent."""

    @property
    def total_s(self) -> list[float]:
        return [sum(both) for both in zip(self.publish_s, self.load_s, strict=True)]


def move(core, rate: float, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, value in core.policy.tensors():
            local = value.to_local()  # of one rank: all of it
            local.add_(torch.randn(local.shape, generator=generator).clamp_(-1, 1), alpha=rate)


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def read_all(folder: Path) -> None:
    """As a worker does: headers first, then every tensor."""
    from primerl_hpc.inference.checkpoint import read_headers
    from primerl_hpc.inference.extension import stream_tensors

    for _, tensor in stream_tensors(read_headers(folder)):
        tensor.clone()


def take_turns(folder: Path, node: Path, options: argparse.Namespace) -> dict[str, Measured]:
    from primerl_hpc.common.rundir import STABLE
    from primerl_hpc.inference.mirror import Mirror
    from primerl_hpc.trainer.broadcast import BroadcastPublisher
    from primerl_hpc.trainer.delta import DeltaPublisher
    from primerl_hpc.trainer.export import publish_policy
    from primerl_hpc.transport.weights_delta import DeltaWeightReader

    run, core = build(folder, QWEN3_600M | {"num_hidden_layers": options.layers})
    links, reader, mirror = DeltaPublisher(run, core), DeltaWeightReader(run), Mirror(node)
    sender = BroadcastPublisher(run, core, "127.0.0.1")
    threading.Thread(target=answer_all, args=(run,), daemon=True).start()
    receiver, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    context.Process(target=receive_all, args=(run.root, theirs, options.turns + 1), daemon=True).start()
    found = {"filesystem": Measured(), "delta": Measured(), "broadcast": Measured()}
    for turn in range(1, options.turns + 2):
        move(core, options.rate, turn)
        started = time.perf_counter()
        links.publish(turn, is_whole=False)
        published = time.perf_counter()
        read_all(mirror.bring_to(reader.open(turn, "engine"), turn))
        loaded = time.perf_counter()
        reader.close(turn, "engine")
        begun = time.perf_counter()
        sender.publish(turn, is_whole=False)
        sent = time.perf_counter()
        received_bytes = receiver.recv()
        if turn == 1:  # whole, a new group, and what later ones find in memory
            continue
        note(found["broadcast"], begun, sent, time.perf_counter(), received_bytes)
        note(found["delta"], started, published, loaded, folder_bytes(run.delta_step(turn)))
        started = time.perf_counter()
        publish_policy(run, core, turn)
        published = time.perf_counter()
        read_all(run.weights_step(turn))
        loaded = time.perf_counter()
        note(found["filesystem"], started, published, loaded, folder_bytes(run.weights_step(turn)))
        run.delete_step(run.weights_step(turn), STABLE)
    return found


def answer_all(run) -> None:
    """What the orchestrator does: one group of trainer and worker for every version."""
    from primerl_hpc.transport.weights_broadcast import answer, read_announcement, read_answer

    while True:
        found = read_announcement(run)
        if found is not None and found[1] and read_answer(run, found[0]) is None:
            answer(run, found[0], "bench", 2)
        time.sleep(0.01)


def receive_all(root: Path, connection: Connection, versions: int) -> None:
    """A worker, in a process of its own: says after each version how many bytes came."""
    import torch

    from primerl_hpc.common.rundir import RunDir
    from primerl_hpc.transport.broadcast_group import Group, connect_store
    from primerl_hpc.transport.weights_broadcast import read_announcement

    torch.set_num_threads(1)
    while (found := read_announcement(RunDir(root))) is None:
        time.sleep(0.01)
    store = connect_store(found[0].host, found[0].port)
    group = Group.join(store, "bench", rank=1, size=2, device=torch.device("cpu"))
    for _ in range(versions):
        connection.send(sum(tensor.clone().nbytes for _, tensor in group.receive()))


def note(measured: Measured, started: float, published: float, loaded: float, written: int) -> None:
    measured.publish_s.append(published - started)
    measured.load_s.append(loaded - published)
    measured.written.append(written)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rate", type=float, default=1e-6)
    parser.add_argument(
        "--folder", type=Path, help="on the filesystem to measure; default: the temporary one"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as shared, tempfile.TemporaryDirectory() as node:
        found = take_turns(Path(shared), Path(node), options)
    print(", ".join(f"{key} {value}" for key, value in describe_machine().items()))
    print(f"medians of {options.turns} turns (lowest to highest), steps of {options.rate:g}\n")
    base = found["filesystem"]
    print(f"{'':>12}{'trainer s':>22}{'engine s':>22}{'MB':>9}{'bytes':>8}{'time':>22}")
    for name, each in found.items():
        share = statistics.median(each.written) / statistics.median(base.written)
        times = [mine / theirs for mine, theirs in zip(each.total_s, base.total_s, strict=True)]
        print(
            f"{name:>12}{spread(each.publish_s):>22}{spread(each.load_s):>22}"
            f"{statistics.median(each.written) / 1e6:>9,.1f}{share:>8.3f}{spread(times):>22}"
        )
    return 0


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)  # libraries' own teardown would bury the figures
