#!/usr/bin/env python3
"""Compare the kernels that the trainer chooses between: of attention, and of the head's operations on logits.

    tools/bench/gpu_kernels.py                               # on one GPU; FlashAttention-4 if it is installed
    tools/bench/gpu_kernels.py --tokens 64 --vocabulary 512  # without a GPU: the head alone, compiled for the CPU

Milliseconds of one layer of Qwen3-0.6B (16 heads, 8 for keys and values, 128 wide) for packed rows of several lengths,
and of its head (16,384 tokens) for several sizes of chunks, with the memory that it needs besides its inputs; forward
and backward. Ratios are to FlashAttention-2 and to the head in place. Differences are of the norm of outputs and
gradients, relative to those.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from machine import ROOT, conclude
from torch import Tensor

sys.path.insert(0, str(ROOT))

from primerl_hpc.trainer.model.head import PLAIN, ChunkedLogprob, FusedHead, compile_head
from primerl_hpc.trainer.parallel import flash
from primerl_hpc.trainer.parallel.flash import Segments, States, flash_backward, flash_forward

ROWS = {
    "16,384": [16_384],
    "8,192": [8192],
    "five samples": [700, 3000, 5000, 1684, 6000],
    "65,536": [65_536],
}
HEADS, KV_HEADS, WIDTH = 16, 8, 128
CHUNK_MIB = (1536, 768, 512, 256)
MOST = {"attention": 0.01, "head": 2e-3}
"""Largest relative difference: attention in bfloat16 is rounded elsewhere by each kernel."""


class Timing(NamedTuple):
    forward_ms: float
    backward_ms: float
    values: Sequence[Tensor]  # output and gradients

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms


def milliseconds(run: Callable[[], Any], device: torch.device, turns: int) -> float:
    """Return the time of a call, the mean of ``turns`` after one that is not counted."""
    run()
    if device.type == "cpu":
        started = time.perf_counter()
        for _ in range(turns):
            run()
        return (time.perf_counter() - started) * 1e3 / turns
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(turns):
        run()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / turns


def difference(values: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    pairs = zip(values, expected, strict=True)
    return max(float((one - other).float().norm() / other.float().norm()) for one, other in pairs)


def attention_rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure torch's FlashAttention-2, then what `choose_kernels` chooses, unless that is the same."""
    name, first = "FlashAttention-2 of torch", {row: time_attention(row, device) for row in ROWS}
    yield from rows_of(name, first, first)
    chosen = flash.choose_kernels(device, HEADS, KV_HEADS, WIDTH)  # replaces torch's operators where it is 3
    if chosen != name:
        yield from rows_of(chosen, {row: time_attention(row, device) for row in ROWS}, first)


def rows_of(name: str, found: dict[str, Timing], first: dict[str, Timing]) -> Iterator[dict[str, Any]]:
    for row, timing in found.items():
        yield {
            "part": "attention",
            "case": row,
            "kernels": name,
            "forward ms": round(timing.forward_ms, 3),
            "backward ms": round(timing.backward_ms, 3),
            "ratio": round(timing.total_ms / first[row].total_ms, 3),
            "difference": difference(timing.values, first[row].values),
        }


def time_attention(row: str, device: torch.device) -> Timing:
    torch.manual_seed(0)
    lengths = ROWS[row]
    total, turns = sum(lengths), 3 if max(lengths) > 20_000 else 10
    shapes = [(total, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *tensors, grad = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    states, scale = States(*tensors), WIDTH**-0.5
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    segments = Segments(bounds, bounds, max(lengths), max(lengths))
    out, sums = flash_forward(states, segments, scale)

    def backward() -> States:
        return flash_backward(grad, states, out, sums, segments, scale)

    forward_ms = milliseconds(lambda: flash_forward(states, segments, scale), device, turns)
    return Timing(forward_ms, milliseconds(backward, device, turns), [out, *backward()])


def head_rows(device: torch.device, tokens: int, vocabulary: int) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(tokens, 1024, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocabulary, 1024, device=device) * 0.02).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)
    temperatures, factor = torch.ones(tokens, device=device), torch.randn(tokens, device=device)

    def step(chunk_tokens: int, fused: FusedHead | None) -> list[Tensor]:
        logprobs, entropies = ChunkedLogprob.apply(
            hidden, weight, targets, temperatures, chunk_tokens, None, None, PLAIN, fused
        )
        return [
            logprobs.detach(),
            entropies,
            *torch.autograd.grad((logprobs * factor).sum(), (hidden, weight)),
        ]

    compiled = compile_head()
    for mib in CHUNK_MIB:
        chunk_tokens, base = max(1, (mib << 20) // (4 * vocabulary)), None
        for name, fused in (("in place", None), ("compiled", compiled)):
            values, peak_mib = step(chunk_tokens, fused), 0.0
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                step(chunk_tokens, fused)
                peak_mib = (torch.cuda.max_memory_allocated() - before) / 2**20
            spent_ms = milliseconds(lambda now=fused, size=chunk_tokens: step(size, now), device, 5)
            base = base or (spent_ms, values)
            yield {
                "part": "head",
                "case": f"chunks of {mib} MiB",
                "kernels": name,
                "both ms": round(spent_ms, 2),
                "peak MiB": round(peak_mib),
                "ratio": round(spent_ms / base[0], 3),
                "difference": difference(values, base[1]),
            }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16_384, help="of the head")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = list(head_rows(device, options.tokens, options.vocabulary))
    if device.type == "cuda":
        rows = [*attention_rows(device), *rows]
    wrong = [
        f"{row['case']}, {row['kernels']}: differs by {row['difference']:.1e}"
        for row in rows
        if row["difference"] > MOST[row["part"]]
    ]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = [{key: row.get(key, "-") for key in columns} for row in rows]
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    what = f"kernels on {name}, torch {torch.__version__}"
    return conclude(what, table, wrong, as_json=options.as_json)


if __name__ == "__main__":
    sys.exit(main())
