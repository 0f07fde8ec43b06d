"""A thousand nodes are planned in a moment and their script stays short; tools/bench prints the numbers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.launch.submission import forecast_for, make_script
from primerl_hpc.recipe.load import load_recipe
from tests.support.helpers import ROOT

RECIPE = """\
kind: rl
name: scale
max_steps: 10
model: {name: Qwen/Qwen3-0.6B}
environments: {train: [{id: reverse-text}]}
layout: {inference: {nodes: NODES}, trainer: {nodes: NODES}}
"""


@pytest.mark.parametrize("nodes", [1024, pytest.param(4096, marks=pytest.mark.slow)])
def test_plan_and_script_of_many_nodes(tmp_path: Path, nodes: int) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("NODES", str(nodes // 2)))
    recipe = load_recipe(str(tmp_path / "recipe.yaml"))
    profile = load_profile("h100x64", overrides=[f"nodes={nodes}", "scheduler.account=physics"])
    start = time.process_time()
    plan, _ = forecast_for(recipe, profile, tmp_path / "run")
    script = make_script(plan, profile, None)
    assert time.process_time() - start < nodes / 100  # a small part of that on an idle machine
    assert len(plan.nodes) == nodes and len(script.encode()) < 100_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, words",
    [
        ("status_scale.py", ("--runs", "60", "--repeats", "1")),
        ("plan_scale.py", ("--nodes", "1", "16")),
        ("plan_forecast.py", ("--gpus", "64")),
    ],
)
def test_the_benches_run_and_print_one_document(script: str, words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "bench" / script), *words, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr  # 1: slower than asked, on a busy machine
    rows = json.loads(done.stdout)["rows"]
    assert rows and all(row.get("queries a look", 1) == 1 for row in rows)
