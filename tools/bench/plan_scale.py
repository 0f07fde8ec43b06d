#!/usr/bin/env python3
"""Measure how planning and rendering scale with the number of nodes: wall time, size of the script and of the plan.

    tools/bench/plan_scale.py                       # 1, 16, 128, 1,024 and 4,096 nodes
    tools/bench/plan_scale.py --nodes 64 --json

An RL recipe on profile h100x64: half of the nodes for engines of one GPU each, half for the trainer. `plan` and
`make_scripts` are measured inside one process (required: at most 1 s in total at 1,024 nodes, and a script below 100 KB
at any size); `command` is the wall time of `primerl-hpc plan --scripts`, with the start of Python (median of three).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import ROOT, show

sys.path.insert(0, str(ROOT))
from primerl_hpc.cluster.load import load_profile
from primerl_hpc.launch.compose import make_script, plan_run
from primerl_hpc.recipe.load import load_recipe

RECIPE = """\
kind: rl
name: scale
model: {name: Qwen/Qwen3-0.6B}
max_steps: 100
environments: {train: [{id: reverse-text}]}
"""
LIMIT_S, LIMIT_BYTES = 1.0, 100_000


def changes_for(nodes: int) -> tuple[list[str], list[str]]:
    """Return the overrides of recipe and profile."""
    engines = nodes // 2
    layout = [f"layout.inference.nodes={engines}", f"layout.trainer.nodes={nodes - engines}"]
    return (layout if nodes > 1 else []), [
        f"nodes={nodes}",
        "scheduler.account=physics",
        "scheduler.partition=gpu",
    ]


def measure(nodes: int, recipe: Path) -> dict[str, Any]:
    of_recipe, of_profile = changes_for(nodes)
    loaded, profile = (
        load_recipe(str(recipe), overrides=of_recipe),
        load_profile("h100x64", overrides=of_profile),
    )
    start = time.perf_counter()
    plan = plan_run(loaded, profile, Path("/scratch/runs/scale")).plan
    planned = time.perf_counter()
    script = make_script(plan, profile, None)
    rendered = time.perf_counter()
    return {
        "nodes": nodes,
        "processes": sum(len(phase.processes) for phase in plan.phases),
        "plan s": planned - start,
        "render s": rendered - planned,
        "command s": statistics.median(run_command(recipe, of_recipe, of_profile) for _ in range(3)),
        "script bytes": len(script.encode()),
        "plan.json KiB": len(plan.model_dump_json()) // 1024,
    }


def run_command(recipe: Path, of_recipe: list[str], of_profile: list[str]) -> float:
    words = [sys.executable, "-m", "primerl_hpc", "plan", "--scripts", str(recipe), "--profile", "h100x64"]
    words += [word for change in of_recipe for word in ("--set", change)]
    words += [word for change in of_profile for word in ("--profile-set", change)]
    start = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return time.perf_counter() - start


def fits(row: dict[str, Any]) -> bool:
    is_quick = row["nodes"] > 1024 or row["plan s"] + row["render s"] <= LIMIT_S
    return is_quick and row["script bytes"] < LIMIT_BYTES


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 16, 128, 1024, 4096])
    parser.add_argument("--json", dest="as_json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        recipe = Path(temporary) / "recipe.yaml"
        recipe.write_text(RECIPE)
        rows = [measure(nodes, recipe) for nodes in options.nodes]
    for row in rows:
        row["fits"] = fits(row)
    show(
        "plan and render by number of nodes; at most 1 s at 1,024 nodes, script below 100 KB",
        rows,
        as_json=options.as_json,
    )
    return 0 if all(row["fits"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
