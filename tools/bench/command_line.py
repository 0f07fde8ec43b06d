#!/usr/bin/env python3
"""How long a user waits for the command line: wall time of whole processes, warm, median of several runs.

tools/bench/command_line.py --model outputs/tiny
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def measure(words: list[str], runs: int) -> tuple[float, float, float]:
    """(median, min, max) in seconds, after one run to warm the caches."""
    script = Path(sys.executable).with_name("primerl-hpc")
    command = [str(script), *words] if script.exists() else [sys.executable, "-m", "primerl_hpc", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        times.append(time.perf_counter() - start)
    counted = times[1:]
    return statistics.median(counted), min(counted), max(counted)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder made by tools/tiny-model")
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    tiny = options.model.resolve()
    recipe = [
        "recipes/reverse_text/tiny.yaml",
        "--profile",
        "local",
        *("--set", f"model.name={tiny}/model", "--set", f"warmup.sft.data.path={tiny}/sft.jsonl"),
    ]
    os.chdir(ROOT)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{'command':<10} {'median s':>9} {'min':>7} {'max':>7}")
    for name, words in (
        ("--help", ["--help"]),
        ("plan", ["plan", *recipe]),
        ("render", ["render", *recipe]),
        ("status", ["status"]),
    ):
        median, low, high = measure(words, options.runs)
        print(f"{name:<10} {median:>9.3f} {low:>7.3f} {high:>7.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
