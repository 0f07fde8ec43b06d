#!/usr/bin/env python3
"""Measure how long the planner's prediction takes: 1,024 GPUs with and without simulation, and a search of layouts.

    tools/bench/plan_forecast.py
    tools/bench/plan_forecast.py --json > docs/measurements/plan_forecast.json

Required: 1,024 GPUs in at most 1 s without and 3 s with simulation, also for the shipped recipe of that size with its
search, alone and as the complete process `primerl-hpc plan`; 2 s for each 500 layouts of a search; and neither torch
nor numpy imported. CPU time of one process with one thread, median of three, which is the wall time on a machine
without other work. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import ROOT, describe_machine, show

sys.path.insert(0, str(ROOT))
from primerl_hpc.cluster.load import load_profile
from primerl_hpc.launch.submission import preview
from primerl_hpc.plan.assess.case import Case, make_case
from primerl_hpc.plan.assess.choice import choice_of
from primerl_hpc.plan.assess.prediction import Depth, predict
from primerl_hpc.plan.assess.search import Space, search
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.plan.predict.shape import known_shape
from primerl_hpc.recipe.load import load_recipe, parse_recipe

EIGHT_B, MIXTURE = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"
GPUS, PER_NODE, REPEATS = 1024, 8, 3
OPTIONS = ("activation_checkpointing", "activation_offload", "optimizer_offload", "cpu_offload")
AUTO: dict[str, Any] = {
    "layout": {
        "inference": dict.fromkeys(("tensor_parallel", "data_parallel", "expert_parallel"), "auto"),
        "trainer": dict.fromkeys(("context_parallel", "replicate"), "auto"),
    },
    "trainer": dict.fromkeys(OPTIONS, "auto"),
}
RECIPE = "math/kimi_k2"
HEAVY = ("torch", "numpy", "vllm", "transformers")


def case_of(model: str, nodes: int, **more: Any) -> Case:
    values = {
        "kind": "rl",
        "name": "speed",
        "model": {"name": model},
        "seq_len": 16_384,
        "max_steps": 100,
        "environments": {"train": [{"id": "reverse-text"}]},
        "rollouts": {
            "batch_size": 4 * nodes * PER_NODE,
            "group_size": 8,
            "sampling": {"max_tokens": 8192},
            "expected": {"completion_tokens": 2000},
        },
    }
    profile = load_profile("h100x64", overrides=[f"nodes={nodes}"]).profile
    return make_case(parse_recipe(values | more), profile, known_shape(model))


def plan_s(nodes: int, depth: Depth) -> float:
    """Return the seconds of a plan of ``nodes`` nodes and of its prediction."""
    half = {"inference": {"nodes": nodes // 2}, "trainer": {"nodes": nodes // 2}}
    case = case_of(EIGHT_B, nodes, layout=half)
    profile = load_profile("h100x64", overrides=[f"nodes={nodes}"]).profile
    started = time.process_time()
    plan = compile_plan(case.recipe, profile, run_dir="/scratch/runs/speed", python="python")
    prediction = predict(case, choice_of(plan.phase("main"), case.shape.num_experts), depth=depth)
    seconds = time.process_time() - started
    assert "time.step" in prediction.figures, prediction
    return seconds


def search_s(nodes: int) -> tuple[float, int]:
    """Return the seconds of a search and the number of its layouts."""
    case = case_of(MIXTURE, nodes, **AUTO)
    started = time.process_time()
    found = search(case, Space(nodes, PER_NODE))
    return time.process_time() - started, found.num_layouts


def recipe_s() -> float:
    """Return the seconds of the plan of a shipped recipe, with search and simulation."""
    started = time.process_time()
    loaded = load_recipe(str(ROOT / "recipes" / f"{RECIPE}.yaml"))
    forecast = preview(loaded, load_profile("h100x1024"), [])[1]
    seconds = time.process_time() - started
    assert forecast.prediction is not None and "time.step" in forecast.prediction.figures
    return seconds


def process_s() -> float:
    """Return the CPU seconds of the command, with the start of Python and all imports."""
    words = ("-m", "primerl_hpc", "plan", f"recipes/{RECIPE}.yaml", "-p", "h100x1024")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def rows_of(nodes: int) -> list[dict[str, Any]]:
    gpus = nodes * PER_NODE

    def median(measure: Callable[[], float]) -> float:
        return statistics.median(measure() for _ in range(REPEATS))

    num_layouts = search_s(8)[1]
    searched = median(lambda: search_s(8)[0])
    rows = [
        {
            "what": f"{gpus} GPUs, closed form",
            "s": median(lambda: plan_s(nodes, "closed_form")),
            "limit s": 1.0,
        },
        {"what": f"{gpus} GPUs, simulated", "s": median(lambda: plan_s(nodes, "full")), "limit s": 3.0},
        {"what": f"search of {num_layouts} layouts", "s": searched, "limit s": 2.0 * num_layouts / 500},
    ]
    if gpus == GPUS:
        for what, measure in (("searched and simulated", recipe_s), ("complete process", process_s)):
            rows.append({"what": f"recipe {RECIPE}, {what}", "s": median(measure), "limit s": 3.0})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=GPUS)
    parser.add_argument("--json", dest="as_json", action="store_true")
    options = parser.parse_args()
    rows = rows_of(max(2, options.gpus // PER_NODE))
    for row in rows:
        row["met"] = row["s"] <= row["limit s"]
    imported = [name for name in HEAVY if name in sys.modules]
    rows.append({"what": "heavy imports", "s": "", "limit s": "", "met": not imported})
    show(f"time of a prediction ({describe_machine()['python']})", rows, as_json=options.as_json)
    return 0 if all(row["met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
