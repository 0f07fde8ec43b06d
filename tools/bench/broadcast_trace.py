#!/usr/bin/env python3
"""Trace a weight broadcast over NCCL at true scale without a GPU: operations, bytes and memory of sender and receivers.

    tools/bench/broadcast_trace.py                                  # Qwen3-30B-A3B, 64 trainer ranks, 16 engine GPUs
    tools/bench/broadcast_trace.py --model deepseek-ai/DeepSeek-V3 --layers 5 --ranks 256 --receivers 64
    tools/bench/broadcast_trace.py --json > docs/measurements/broadcast_trace.json

The publisher of the trainer's rank 0 gathers and sends all weights in a fake process group, on the GPU of fake_gpu.py;
then receivers read the same headers. Exits with 1 if their operations differ in order, group or bytes, if a bucket
exceeds its bound, or if tensors arrive that were not sent. Also traces the export to files, in which no copy may make
the host wait.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import fake_gpu
from machine import ROOT, conclude

sys.path.insert(0, str(ROOT))

GIB, MIB = 2**30, 2**20


def fake_group(rank: int, size: int) -> Any:
    """Return a process group whose operations do nothing."""
    import torch
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch.distributed import ProcessGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore

    group = ProcessGroup(FakeStore(), rank, size)
    backend = FakeProcessGroup._create_internal(rank, size)
    group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.CUSTOM, backend)
    return group


def trace(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    fake_gpu.load()
    import torch
    from step_tracer import traced_trainer
    from torch._subclasses.fake_tensor import FakeTensor
    from trainer_trace import TraceCase, make_recipe

    from primerl_hpc.trainer.weights import broadcast
    from primerl_hpc.trainer.weights.filesystem import export_types, gather_shards
    from primerl_hpc.transport.weights import broadcast_group

    case = TraceCase(
        options.model,
        options.ranks,
        4096,
        layers=options.layers,
        trainer={"activation_checkpointing": "full"},
    )
    headers: list[bytes] = []

    def recorded(data: bytearray, dtype: Any) -> Any:
        headers.append(bytes(data))
        return torch.empty(len(data), dtype=dtype)

    def unknown(values: list[int], *, device: Any) -> Any:
        return torch.empty(len(values), dtype=torch.int64, device=device)

    class Header:
        def tobytes(self) -> bytes:
            return unread.popleft()

    size = 1 + options.receivers
    with tempfile.TemporaryDirectory() as name:
        recipe = make_recipe(case, Path(name))
        with traced_trainer(recipe, Path(name), ranks=options.ranks, ranks_per_node=8) as (tracer, trainer):
            sent: list[tuple[str, tuple[int, ...]]] = []
            group = broadcast_group.BroadcastGroup("weights", fake_group(0, size), trainer.world.device)
            publisher: Any = broadcast.BroadcastPublisher.__new__(broadcast.BroadcastPublisher)
            publisher.trainer, publisher._group = trainer, group
            publisher._announce = publisher._meet = lambda _: group
            broadcast.publish_offer = lambda *_, **__: None
            broadcast.broadcast_from_rank0 = lambda value: value
            publisher.run = None
            send = group.send

            def noted(tensors: dict[str, Any]) -> None:
                sent.extend((key, tuple(value.shape)) for key, value in tensors.items())
                send(tensors)

            group.send = noted
            torch.frombuffer, torch.tensor = recorded, unknown
            tracer.restart()
            before = tracer.live["cuda"]
            publisher._send(1)
            types = export_types(trainer.policy, torch.bfloat16)
            sender = [(item.ranks, item.num_bytes) for item in tracer.collectives if item.name == "broadcast"]
            rows = [row_of("trainer rank 0", sender, tracer.peak - before, len(sent))]
            tracer.restart()
            before = tracer.live["cuda"]
            kept = sum(len(found) for _, _, found in gather_shards(trainer.policy, trainer.world, types))
            files = [(item.ranks, item.num_bytes) for item in tracer.collectives if item.ranks]
            rows.append(row_of("files of rank 0", files, tracer.peak - before, kept))
            wrong = [f"the export waits for {what} at {place}" for what, place in tracer.waits]
            for rank in (1, options.receivers):
                unread = deque(headers)
                sizes = iter(sizes_of(sender, headers))
                FakeTensor.tolist = lambda _: next(sizes)  # noqa: B023
                FakeTensor.numpy = lambda _: Header()
                receiver = broadcast_group.BroadcastGroup("weights", fake_group(rank, size), group.device)
                tracer.restart()
                before = tracer.live["cuda"]
                found = [(key, tuple(value.shape)) for key, value in receiver.receive()]
                own = [
                    (item.ranks, item.num_bytes) for item in tracer.collectives if item.name == "broadcast"
                ]
                rows.append(row_of(f"engine rank {rank}", own, tracer.peak - before, len(found)))
                if own != sender:
                    wrong.append(f"rank {rank} has other operations than the trainer")
                if found != sent:
                    wrong.append(f"rank {rank} received other tensors than were sent, or in another order")
    allowed = broadcast_group.BUCKET_BYTES + max(map(len, headers))
    wrong += ["a bucket exceeds its bound" for _, size in sender if size > allowed][:1]
    return rows, wrong


def sizes_of(operations: list[tuple[int, int]], headers: list[bytes]) -> list[list[int]]:
    """Return the sizes of header and pieces of each bucket, as the sender sends them; zeros at the end."""
    messages = [size for _, size in operations][1::2]
    return [[len(header), size - len(header)] for header, size in zip(headers, messages, strict=True)] + [
        [0, 0]
    ]


def row_of(who: str, operations: list[tuple[int, int]], peak: int, tensors: int) -> dict[str, Any]:
    sizes = [size for _, size in operations]
    return {
        "process": who,
        "group": operations[0][0],
        "operations": len(operations),
        "sent_gib": round(sum(sizes) / GIB, 3),
        "largest_mib": round(max(sizes) / MIB, 3),
        "tensors": tensors,
        "peak_gib": round(peak / GIB, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen/Qwen3-30B-A3B", help="a model whose config.json is shipped")
    parser.add_argument("--layers", type=int, help="of the model [default: all]")
    parser.add_argument("--ranks", type=int, default=64, help="of the trainer")
    parser.add_argument("--receivers", type=int, default=16, help="GPUs of all engines")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows, wrong = trace(options)
    code = conclude(f"A broadcast of {options.model} on fake GPUs", rows, wrong, as_json=options.json)
    sys.stdout.flush()
    os._exit(code)  # modules that believe in the GPU would fail while they are finalized


if __name__ == "__main__":
    sys.exit(main())
