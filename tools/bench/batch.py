#!/usr/bin/env python3
"""Measure packing a batch for the trainer's ranks, writing it, and writing the queue file of a checkpoint.

    tools/bench/batch.py                                       # 2,048 rollouts of 4,096 tokens for 8 ranks
    tools/bench/batch.py --rollouts 512 --repeats 5 --json

`data` is the size of what the trainer reads, in MiB; `peak x` is the memory of this process above its start, samples
included, over `data`, until the first batch is written. `cpu s` is the CPU time of packing and writing; `plain s` the
time to write and fsync the same number of bytes from one buffer to the same disk, in the same repeat. `queue s` is the
time to write the same rollouts as finished rollouts that wait for a batch, `queue read s` to read them. Required: both
below 2 s, peak below 3.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import ROOT, show

sys.path.insert(0, str(ROOT))
import numpy as np

from primerl_hpc.orchestrator.batches.packing import pack
from primerl_hpc.orchestrator.checkpoint.queue_file import read_queue, write_queue
from primerl_hpc.orchestrator.types import Rollout, Sample, ScoredGroup, TaskRef, TrainSample
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.rollouts.filesystem import FilesystemSender
from primerl_hpc.transport.rollouts.types import StepInfo

GROUP = 16
MIB = 1 << 20


def make_group(group_id: int, tokens: int, rng: np.random.Generator) -> ScoredGroup:
    rollouts, trained = [], []
    for _ in range(GROUP):
        mask = np.arange(tokens) >= tokens // 8
        logprobs = np.where(mask, -rng.random(tokens, np.float32), np.float32(0))
        sample = Sample(rng.integers(0, 150_000, tokens, np.int32), mask, logprobs, temperature=1.0)
        rollouts.append(Rollout(0.5, [sample], int(mask.sum()), tokens // 8, num_turns=1, is_truncated=False))
        trained.append([TrainSample(sample, float(rng.normal()), 0)])
    return ScoredGroup(group_id, TaskRef(0, group_id), rollouts, [0] * GROUP, np.zeros(GROUP), trained, 0)


def plain_write_s(path: Path, num_bytes: int) -> float:
    block = memoryview(os.urandom(MIB))
    start = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(num_bytes // MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(
    folder: Path, groups: list[ScoredGroup], seq_len: int, num_ranks: int, step: int
) -> dict[str, Any]:
    folder.mkdir()
    run = RunDir(folder)
    samples = [sample for group in groups for each in group.samples for sample in each]
    start, cpu_start = time.perf_counter(), time.process_time()
    packed = pack(samples, seq_len=seq_len, num_ranks=num_ranks)
    packed_at = time.perf_counter()
    FilesystemSender(run).send(StepInfo(step=step), packed.ranks)
    sent_at, cpu_at = time.perf_counter(), time.process_time()
    size = sum(path.stat().st_size for path in run.rollouts_step(step).iterdir())
    peak = peak_bytes()
    del packed
    plain_s = plain_write_s(folder / "plain", size)
    queue_start = time.perf_counter()
    write_queue(folder / "queue.safetensors", groups)
    queue_at = time.perf_counter()
    assert len(read_queue(folder / "queue.safetensors")) == len(groups)
    read_at = time.perf_counter()
    return {
        "data MiB": size / MIB,
        "pack s": packed_at - start,
        "write s": sent_at - packed_at,
        "both s": sent_at - start,
        "cpu s": cpu_at - cpu_start,
        "plain s": plain_s,
        "peak x": peak / size,
        "queue s": queue_at - queue_start,
        "queue read s": read_at - queue_at,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure [default: the temporary folder]"
    )
    parser.add_argument("--json", dest="as_json", action="store_true")
    options = parser.parse_args()
    before = peak_bytes()
    rng = np.random.default_rng(0)
    groups = [make_group(number, options.tokens, rng) for number in range(options.rollouts // GROUP)]
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-batch-", dir=options.folder) as folder:
        for step in range(1, options.repeats + 1):
            row = measure(Path(folder) / f"{step}", groups, options.seq_len, options.ranks, step)
            row["peak x"] = rows[0]["peak x"] if rows else row["peak x"] - before / (row["data MiB"] * MIB)
            rows.append(row)
    rows.append({name: statistics.median(row[name] for row in rows) for name in rows[0]})
    show(
        f"{options.rollouts} rollouts of {options.tokens} tokens, {options.ranks} ranks; the last line is the median",
        rows,
        as_json=options.as_json,
    )
    return 0 if rows[-1]["both s"] < 2 and rows[-1]["peak x"] < 3 else 1


if __name__ == "__main__":
    sys.exit(main())
