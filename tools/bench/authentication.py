#!/usr/bin/env python3
"""Measure the overhead of authenticated connections: this checkout against one from before, in turns.

    git worktree add ../before 86772ce && (cd ../before && tools/install)
    tools/bench/authentication.py --before ../before --runs 3 --json

Compares the CPU time per rollout of `tools/bench/orchestrator.py` (256 in flight, mock engine) and the duration of the
demo (recipes/reverse_text/tiny.yaml on the profile local). Both checkouts need an environment in ``.venv``. The demo
runs real engines and environment servers, so its ratio also contains every other change between the two revisions.

Required: both ratios of medians at most 1.05. Exits with 1 otherwise. Takes about 25 minutes with 3 runs, on a machine
that does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from machine import is_met, show  # noqa: E402

LIMIT = 1.05


def run(checkout: Path, words: list[str], folder: Path) -> str:
    """Run a command of a checkout's environment and return its output. Raises CalledProcessError."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{checkout / '.venv/bin'}:{env['PATH']}"
    return subprocess.run(words, cwd=folder, env=env, check=True, text=True, capture_output=True).stdout


def orchestrator_ms(checkout: Path, folder: Path, options: argparse.Namespace) -> float:
    """Return the orchestrator's CPU time per rollout in ms."""
    words = [
        "python",
        str(checkout / "tools/bench/orchestrator.py"),
        "--model",
        "outputs/tiny/model",
        "--json",
    ]
    words += ["--in-flight", "256", "--turns", "1", "--seconds", str(options.seconds)]
    return json.loads(run(checkout, words, folder))["rows"][0]["cpu_ms"]


def demo_seconds(checkout: Path, folder: Path, number: int) -> float:
    """Return the duration of the demo's run in seconds."""
    recipe = folder / "tiny.yaml"
    shutil.copy(checkout / "recipes/reverse_text/tiny.yaml", recipe)
    words = ["primerl-hpc", "submit", str(recipe), "--profile", "local", "--follow"]
    words += ["--run-dir", f"run-{checkout.name}-{number}"]
    started = time.perf_counter()
    run(checkout, words, folder)
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="checkout of the revision to compare with")
    parser.add_argument("--runs", type=int, default=3, help="runs of each checkout")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="duration of each orchestrator measurement"
    )
    parser.add_argument("--skip-demo", action="store_true", help="measure the orchestrator only")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    checkouts = {"before": options.before.resolve(), "after": ROOT}
    found: dict[str, dict[str, list[float]]] = {"orchestrator_cpu_ms": {}, "demo_s": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(ROOT, [str(ROOT / "tools/tiny-model"), "outputs/tiny"], folder)
        for _ in range(options.runs):
            for which, checkout in checkouts.items():
                value = orchestrator_ms(checkout, folder, options)
                print(f"orchestrator, {which}: {value:.3f} ms of CPU per rollout", file=sys.stderr)
                found["orchestrator_cpu_ms"].setdefault(which, []).append(value)
        for number in range(0 if options.skip_demo else options.runs):
            for which, checkout in checkouts.items():
                value = demo_seconds(checkout, folder, number)
                print(f"demo, {which}: {value:.1f} s", file=sys.stderr)
                found["demo_s"].setdefault(which, []).append(value)
    rows: list[dict[str, Any]] = [
        {
            "measured": measured,
            "before": values["before"],
            "after": values["after"],
            "ratio": statistics.median(values["after"]) / statistics.median(values["before"]),
        }
        for measured, values in found.items()
        if values
    ]
    show("authentication: after / before", rows, as_json=options.json)
    with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
        met = [is_met(f"ratio of {row['measured']}", row["ratio"], at_most=LIMIT) for row in rows]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
