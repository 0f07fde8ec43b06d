#!/usr/bin/env python3
"""Run the twins of recipes for GPUs: a tiny model of the same family and the same environment on two CPU cores.

    tools/bench/recipe_twins.py --out docs/measurements/recipe_twins.json         # every twin, about half an hour
    tools/bench/recipe_twins.py --recipes math/qwen3_4b --set max_steps=2         # one of them, shorter

The twin of wordle needs `pip install 'verifiers[ta]'`; no twin needs a network. Rows of other recipes in the file of
--out are kept.

A twin starts with a warm-up whose demonstrations are partly wrong; RL must raise the reward of held-out tasks. The
result has the rewards of each evaluation and the mismatch KL. Exits with 1 if a twin fails, or if its reward does not
rise as expected.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.bench.rewards import EXPECTED, run_recipe  # noqa: E402

TWINS = {
    "reverse_text/qwen3_0.6b": "reverse_text/tiny",
    "alphabet_sort/qwen3_4b_lora": "alphabet_sort/tiny",
    "math/qwen3_4b": "math/tiny",
    "local_search/qwen3_4b": "local_search/tiny",
    "wordle/qwen3_1.7b": "wordle/tiny",
    "reverse_text/qwen3_0.6b_one_gpu": "reverse_text/colocated",
}


def run_twin(recipe: str, seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Return the measured row of the twin of ``recipe``."""
    twin = TWINS[recipe]
    row = run_recipe(twin, seed, folder, overrides)
    model = " ".join(EXPECTED[twin].model)
    return {**row, "recipe": recipe, "twin": twin, "model": model, "commit": _commit()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", choices=TWINS, default=list(TWINS), metavar="RECIPE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--folder", type=Path, help="keep everything here [default: a temporary folder]")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for recipe in options.recipes:
            rows.append(run_twin(recipe, options.seed, folder, options.overrides))
            print(json.dumps(rows[-1]), flush=True)
    kept = json.loads(options.out.read_text())["twins"] if options.out and options.out.exists() else []
    measured = {row["recipe"]: row for row in [*kept, *rows]}
    result = {
        "command": "tools/bench/recipe_twins.py --out docs/measurements/recipe_twins.json",
        "machine": f"{os.cpu_count()} CPU cores, Python {platform.python_version()}",
        "twins": [measured[recipe] for recipe in TWINS if recipe in measured],
        "not_run": [recipe for recipe in TWINS if recipe not in measured],
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row["is_met"] for row in rows) else 1


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
