#!/usr/bin/env python3
"""Measure a weight update of the engines by transport: seconds at both ends, and bytes through the shared folder.

    tools/bench/weight_update.py                        # the shape of Qwen3-0.6B with 8 layers, written as bfloat16
    tools/bench/weight_update.py --rate 3e-6            # steps of another size
    tools/bench/weight_update.py --folder /lustre/me    # the shared folder is there; the engine's copy stays in TMPDIR

Before every turn all weights change as AdamW changes them: by at most the rate, up or down. Then each transport
publishes the same version as the trainer does, and an engine worker (for a broadcast: in its own process) verifies it
and holds every tensor; vLLM's own loading, which follows, is the same for all. Each ratio is of one turn.
"""

from __future__ import annotations

import argparse
import json
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

from machine import QWEN3_600M, ROOT, describe_machine

sys.path.insert(0, str(ROOT))


def build(folder: Path, shape: dict):
    """Create a one-rank trainer with random weights."""
    from primerl_hpc.recipe.load import parse_recipe
    from primerl_hpc.run.ports import free_port
    from primerl_hpc.run.rundir import RunDir
    from primerl_hpc.trainer.setup import start_world
    from primerl_hpc.trainer.train_step import build_trainer
    from primerl_hpc.trainer.watchdog import Watchdog

    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {**group, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(shape))
    recipe = parse_recipe(
        {
            "kind": "sft",
            "name": "x",
            "model": {"name": str(model)},
            "max_steps": 1,
            "sft": {"data": {"path": "x"}},
        }
    )
    run = RunDir(folder / "run")
    watchdog = Watchdog(run, "bench", rank=0, size=1, timeout_s=3600)
    return run, build_trainer(recipe, str(model), start_world(recipe), watchdog, may_be_random=True)


@dataclass
class Measured:
    publish_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    """Bytes written to the shared folder, which the engine reads; for a broadcast, the bytes sent."""

    @property
    def total_s(self) -> list[float]:
        return [sum(both) for both in zip(self.publish_s, self.load_s, strict=True)]


def move(trainer, rate: float, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, value in trainer.policy.tensors():
            local = value.to_local()  # one rank holds the full tensor
            local.add_(torch.randn(local.shape, generator=generator).clamp_(-1, 1), alpha=rate)


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def read_all(folder: Path) -> None:
    """Read like an engine worker: headers first, then every tensor."""
    from primerl_hpc.inference.checkpoint import read_headers
    from primerl_hpc.inference.worker.extension import stream_tensors

    for _, tensor in stream_tensors(read_headers(folder)):
        tensor.clone()


def take_turns(folder: Path, node: Path, options: argparse.Namespace) -> dict[str, Measured]:
    from primerl_hpc.inference.worker.mirror import Mirror
    from primerl_hpc.run.step_dirs import STABLE
    from primerl_hpc.trainer.weights.broadcast import BroadcastPublisher
    from primerl_hpc.trainer.weights.delta import DeltaPublisher
    from primerl_hpc.trainer.weights.filesystem import publish_policy
    from primerl_hpc.transport.weights.delta import DeltaWeightReader

    run, trainer = build(folder, QWEN3_600M | {"num_hidden_layers": options.layers})
    links, reader, mirror = DeltaPublisher(run, trainer), DeltaWeightReader(run), Mirror(node)
    sender = BroadcastPublisher(run, trainer, "127.0.0.1")
    threading.Thread(target=answer_all, args=(run,), daemon=True).start()
    receiver, sender = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    context.Process(target=receive_all, args=(run.root, sender, options.turns + 1), daemon=True).start()
    found = {"filesystem": Measured(), "delta": Measured(), "broadcast": Measured()}
    for turn in range(1, options.turns + 2):
        move(trainer, options.rate, turn)
        started = time.perf_counter()
        links.publish(turn, is_full=False)
        published = time.perf_counter()
        read_all(mirror.update_to(reader.open(turn, "engine"), turn))
        loaded = time.perf_counter()
        reader.close(turn, "engine")
        begun = time.perf_counter()
        sender.publish(turn, is_full=False)
        sent = time.perf_counter()
        received_bytes = receiver.recv()
        if turn == 1:  # the first update writes full weights, opens a group and warms caches
            continue
        note(found["broadcast"], begun, sent, time.perf_counter(), received_bytes)
        note(found["delta"], started, published, loaded, folder_bytes(run.delta_step(turn)))
        started = time.perf_counter()
        publish_policy(run, trainer, turn)
        published = time.perf_counter()
        read_all(run.weights_step(turn))
        loaded = time.perf_counter()
        note(found["filesystem"], started, published, loaded, folder_bytes(run.weights_step(turn)))
        run.delete_step(run.weights_step(turn), STABLE)
    return found


def answer_all(run) -> None:
    """Act as the orchestrator: one group of trainer and worker for every version."""
    from primerl_hpc.transport.weights.broadcast import publish_group, read_group, read_offer

    while True:
        found = read_offer(run)
        if found is not None and found[1] and read_group(run, found[0]) is None:
            publish_group(run, found[0], "bench", 2)
        time.sleep(0.01)


def receive_all(root: Path, connection: Connection, versions: int) -> None:
    """Run a worker in its own process; it reports the bytes received after each version."""
    import torch

    from primerl_hpc.run.access.keys import run_keys
    from primerl_hpc.run.rundir import RunDir
    from primerl_hpc.transport.weights.broadcast import read_offer
    from primerl_hpc.transport.weights.broadcast_group import BroadcastGroup, connect_store

    torch.set_num_threads(1)
    while (found := read_offer(RunDir(root))) is None:
        time.sleep(0.01)
    store = connect_store(run_keys(RunDir(root)), found[0].host, found[0].port)
    group = BroadcastGroup.join(store, "bench", rank=1, size=2, device=torch.device("cpu"))
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
        "--folder", type=Path, help="folder on the filesystem to measure [default: the temporary folder]"
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
        times = [own / reference for own, reference in zip(each.total_s, base.total_s, strict=True)]
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
    os._exit(code)  # skip the teardown of libraries, whose output would hide the figures
