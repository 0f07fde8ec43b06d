#!/usr/bin/env python3
"""Measure what a weight update costs an engine per tensor, apart from bytes: vLLM binds and copies them in Python.

    tools/bench/reload_tensors.py                       # a mixture with 128 experts per layer, and tiny matrices
    tools/bench/reload_tensors.py --layers 2 --profile  # with the functions that take the time

The engine runs on a CPU in this process. CPU seconds of `primerl_update_weights`, of the fastest of the updates, over
the number of tensors of the version, and from that the time for models with as many tensors as real ones. Updates take
turns: as in a run, without the check that all parameters were written, and with each expert's tensors passed to vLLM.
``ratio_of_check`` and ``ratio_to_single`` are the time of the first over those of the others.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from machine import ROOT, conclude

sys.path.insert(0, str(ROOT))

REAL = {"Qwen3-30B-A3B": 18_867, "Qwen3-235B-A22B": 36_945, "DeepSeek-V3": 45_505}
"""Tensors of a version of real models."""
SIZES = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64, "head_dim": 32}


@contextmanager
def without_check() -> Iterator[None]:
    """Load without `LoadRecord`, as vLLM alone does."""
    from primerl_hpc.inference.worker import reload

    class NoRecord(reload.LoadRecord):
        def watch(self, weights: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
            return weights

        def check(self) -> None: ...

        @contextmanager
        def counting(self) -> Iterator[None]:
            yield

    plain, reload.LoadRecord = reload.LoadRecord, NoRecord
    try:
        yield
    finally:
        reload.LoadRecord = plain


@contextmanager
def one_by_one() -> Iterator[None]:
    """Pass each expert's tensors to vLLM, without `StackedExperts`."""
    from primerl_hpc.inference.worker import reload

    class SingleExperts(reload.StackedExperts):
        def through(self, weights: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
            return weights

        @contextmanager
        def observing(self) -> Iterator[None]:
            yield

    plain, reload.StackedExperts = reload.StackedExperts, SingleExperts
    try:
        yield
    finally:
        reload.StackedExperts = plain


VARIANTS = {"as in a run": nullcontext, "without check": without_check, "one by one": one_by_one}


def measure(experts: int, layers: int, updates: int, *, with_profile: bool) -> dict[str, Any]:
    from safetensors import safe_open

    from primerl_hpc.transport.weights.types import to_body
    from tests.support.served_updates import SERVED, Engine, make_model

    SERVED["qwen3_moe"] |= SIZES | {
        "num_experts": experts,
        "num_hidden_layers": layers,
        "num_experts_per_tok": 8,
    }
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            make_model(Path(folder, str(number)), "qwen3_moe", seed=number)
        with safe_open(Path(folder, "0", "model.safetensors"), "pt") as file:
            tensors = len(list(file.keys()))
        engine = Engine(Path(folder, "0"))
        seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        last = len(VARIANTS) * updates
        for version in range(1, last + 1):
            variant = list(VARIANTS)[version % len(VARIANTS)]
            body = to_body(Path(folder, str(version % 2)), version)
            (prepared,) = engine.llm.collective_rpc("primerl_prepare_update", args=(body,))
            assert "error" not in prepared, prepared
            profile = cProfile.Profile()
            with VARIANTS[variant]():
                started = time.process_time()
                if with_profile and version == last:
                    profile.enable()
                engine.llm.collective_rpc("primerl_update_weights", args=(body,))
                profile.disable()
                seconds[variant].append(time.process_time() - started)
        if with_profile:
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    best = {
        variant: min(found[: updates - 1] if with_profile else found) for variant, found in seconds.items()
    }
    plain = best["as in a run"]
    each = plain / tensors
    return {
        "experts": experts,
        "layers": layers,
        "tensors": tensors,
        "cpu_s": round(plain, 3),
        "ratio_of_check": round(plain / best["without check"], 3),
        "ratio_to_single": round(plain / best["one by one"], 3),
        "us_per_tensor": round(1e6 * each, 1),
        **{f"{name}_s": round(each * number, 1) for name, number in REAL.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print the functions of the last update")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    from primerl_hpc.plan.engine_env import engine_env

    os.environ.update(engine_env("cpu"))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    rows = [
        measure(options.experts, layers, options.updates, with_profile=options.profile)
        for layers in options.layers
    ]
    return conclude("Weight updates of many small tensors", rows, [], as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
