#!/usr/bin/env python3
"""Compare the chunked head with the plain one: peak memory, time, log-probabilities and entropy.

    tools/bench/chunked_head.py                                  # vocabulary 151,936, 4,096 tokens, hidden size 1,024
    tools/bench/chunked_head.py --device cuda --dtype bfloat16

Memory is that of forward and backward in addition to inputs, weight and the weight's gradient, which both need: on CPU
torch's count of allocated bytes, on a GPU the allocator's peak. Each variant runs in its own process.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from machine import is_met, peak_of
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from primerl_hpc.trainer.model.head import PLAIN, ChunkedLogprob, auto_chunk_tokens, compile_head

SHARE = {"float32": 1 / 8, "bfloat16": 1 / 4}
"""Share of the plain head's memory: with bfloat16, the weight's gradient is accumulated in an additional float32
buffer.
"""

ROUNDING = {"float32": 1e-5, "bfloat16": 2**-7}
"""Largest difference of values, of the largest one: products of other sizes round logits otherwise, in bfloat16 to 8
bits.
"""


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, weight).float() / temperatures[:, None]
    logs = torch.log_softmax(logits, -1)
    with torch.no_grad():
        entropies = -(logs.exp() * logs).sum(-1)
    return logs.gather(-1, targets[:, None])[:, 0], entropies


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    chunk_tokens = auto_chunk_tokens(len(weight), weight.device)
    fused = compile_head() if weight.is_cuda else None  # as trainer.compile: auto
    return ChunkedLogprob.apply(hidden, weight, targets, temperatures, chunk_tokens, None, None, PLAIN, fused)


def run_variant(options: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(0)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    hidden = torch.randn(options.tokens, options.hidden, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(options.vocabulary, options.hidden, device=device) / options.hidden**0.5
    weight = weight.to(dtype).requires_grad_()
    targets = torch.randint(options.vocabulary, (options.tokens,), device=device)
    temperatures = torch.full((options.tokens,), 0.9, device=device)
    head = {"plain": plain, "chunked": chunked}[options.variant]

    def step() -> tuple[Tensor, Tensor]:
        logprobs, entropies = head(hidden, weight, targets, temperatures)
        logprobs.mean().backward()
        return logprobs.detach(), entropies

    if device.type == "cuda":
        step()  # warm up: exclude workspaces and kernels of the first call
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        logprobs, entropies = step()
        torch.cuda.synchronize()
        duration_s = time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with torch.profiler.profile(
            profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
        ) as profile:
            started = time.perf_counter()
            logprobs, entropies = step()
            duration_s = time.perf_counter() - started
        peak = peak_of(profile)
    peak -= weight.grad.numel() * weight.grad.element_size()
    values = {
        "logprobs": logprobs,
        "entropies": entropies,
        "hidden": hidden.grad,
        "weight": weight.grad[:: max(1, len(weight) // 4096)],
    }
    torch.save({name: value.float().cpu() for name, value in values.items()}, options.values)
    return {"peak_mib": peak / 2**20, "seconds": duration_s}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--variant", choices=["plain", "chunked"], help=argparse.SUPPRESS)
    parser.add_argument("--values", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(run_variant(options)))
        return 0
    results, values = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for variant in ("plain", "chunked"):
            path = Path(folder) / variant
            command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant, "--values", str(path)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            results[variant] = json.loads(done.stdout.splitlines()[-1])
            values[variant] = torch.load(path, weights_only=True)
    print(f"{platform.machine()}, torch {torch.__version__}, {options.device} {options.dtype}")
    for variant, row in results.items():
        print(f"{variant:>8}: {row['peak_mib']:8.0f} MiB  {row['seconds']:6.2f} s")
    print(f"   ratio: {results['plain']['peak_mib'] / results['chunked']['peak_mib']:8.1f}")
    differences = {}
    for name, value in values["plain"].items():
        differences[name] = float((value - values["chunked"][name]).abs().max() / value.abs().max())
        print(f"{name:>10}: largest difference {differences[name]:.1e} of the largest value")
    share = results["chunked"]["peak_mib"] / results["plain"]["peak_mib"]
    worst = max(differences["logprobs"], differences["entropies"])
    met = is_met("memory over the plain one's", share, at_most=SHARE[options.dtype])
    return 0 if is_met("values differ by", worst, at_most=ROUNDING[options.dtype]) and met else 1


if __name__ == "__main__":
    sys.exit(main())
