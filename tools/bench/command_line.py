#!/usr/bin/env python3
"""Measure how long the command line takes: wall time of complete processes with warm caches, median of several runs.

tools/bench/command_line.py --model outputs/tiny       # exit code 1 if a required figure is missed
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from machine import ROOT, describe_machine, is_met

AT_MOST_S = {"--help": 0.25, "plan": 1.0, "render": 1.0}


def measure(words: list[str], runs: int) -> tuple[float, float, float]:
    """Return (median, min, max) in seconds, after one run to warm the caches."""
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
    parser.add_argument("--model", type=Path, required=True, help="folder created by tools/tiny-model")
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
    machine = describe_machine()
    print(f"{machine['machine']}, {machine['cores']} cores, Python {machine['python']}")
    print(f"{'command':<10} {'median s':>9} {'min':>7} {'max':>7}")
    medians = {}
    for name, words in (
        ("--help", ["--help"]),
        ("plan", ["plan", *recipe]),
        ("render", ["render", *recipe]),
        ("status", ["status"]),
    ):
        medians[name], low, high = measure(words, options.runs)
        print(f"{name:<10} {medians[name]:>9.3f} {low:>7.3f} {high:>7.3f}")
    met = [is_met(f"{name} in s", medians[name], at_most=limit) for name, limit in AT_MOST_S.items()]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
