#!/usr/bin/env python3
"""Run the shipped recipes on several seeds as a user would: held-out reward before and after, mismatch KL, time,
memory.

    tools/bench/rewards.py                                              # every recipe on seeds 0, 1, 2: an hour
    tools/bench/rewards.py --recipes reverse_text/tiny --seeds 1 2      # a JSON line per run, and a table

Each seed has its own folder with the models and demonstrations of tools/tiny-model; existing runs in a kept folder
(--folder) are measured, not repeated. Exits with 1 if a run fails, or if its reward or mismatch KL is outside
`EXPECTED`. Memory is the sum of proportional set sizes (PSS) of all processes of the run, sampled each second: shared
pages count once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from primerl_hpc.common.names import RunState  # noqa: E402
from primerl_hpc.observe.status.snapshot import take_snapshot  # noqa: E402
from primerl_hpc.recipe.load import load_recipe  # noqa: E402
from primerl_hpc.run.metrics import read_steps  # noqa: E402
from primerl_hpc.run.rundir import RunDir  # noqa: E402


class MemoryWatch(threading.Thread):
    """Tracks the peak of the sum of PSS over all processes of a run directory."""

    def __init__(self, root: Path) -> None:
        super().__init__(daemon=True)
        self.root, self.peak_bytes, self.ended = str(root), 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(1.0):
            total = 0
            for process in self.processes():
                try:
                    total += process.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            self.peak_bytes = max(self.peak_bytes, total)

    def processes(self) -> set[psutil.Process]:
        """Return supervisor and guards, found by the run directory on their command line, and their descendants."""
        found = set()
        for process in psutil.process_iter():
            try:
                if self.root in process.cmdline():
                    found |= {process, *process.children(recursive=True)}
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


@dataclass(frozen=True)
class Expected:
    """Of the held-out reward of the first and the last evaluation, and the mean mismatch KL of the last 3 steps."""

    model: tuple[str, ...]
    """Arguments of tools/tiny-model."""
    rise: float
    before_max: float = 1.0
    after_min: float = 0.0
    kl_max: float | None = 0.01
    """None if the rollouts are not sampled from the policy."""
    needs: str | None = None
    """Recipe of the run from which this one starts."""
    folders: tuple[tuple[str, str], ...] = ()
    """Keys of the recipe, each with a folder that tools/tiny-model made next to the model."""


TINY = "reverse_text/tiny"
EXPECTED = {
    TINY: Expected(("tiny",), rise=0.2, before_max=0.65, after_min=0.85),
    "reverse_text/lora": Expected(("tiny",), rise=0.2),
    "reverse_text/colocated": Expected(("tiny",), rise=0.2, before_max=0.65, after_min=0.85),
    "reverse_text/moe": Expected(("tiny-moe", "--experts", "8"), rise=0.2, kl_max=0.03),
    "alphabet_sort/tiny": Expected(("tiny-sort", "--task", "alphabet-sort"), rise=0.1),
    "color_squares/tiny": Expected(("tiny-colors", "--task", "color-squares"), rise=0.04),
    "math/tiny": Expected(("tiny-math", "--task", "math-problems"), rise=0.1),
    "local_search/tiny": Expected(("tiny-search", "--task", "local-search"), rise=0.2),
    "wordle/tiny": Expected(
        ("tiny-wordle", "--task", "wordle"), rise=0.05, folders=(("env.NLTK_DATA", "nltk_data"),)
    ),
    "reverse_text/opd": Expected(("tiny",), rise=0.2, needs=TINY),
    "reverse_text/sft_distill": Expected(("tiny",), rise=0.2, kl_max=None, needs=TINY),
}


def run_recipe(recipe: str, seed: int, folder: Path, overrides: list[str]) -> dict[str, object]:
    """Run one recipe in ``folder`` and return the row of the table."""
    expected = EXPECTED[recipe]
    name, *options = expected.model
    model = [str(ROOT / "tools" / "tiny-model"), f"outputs/{name}", *options, "--seed", str(seed)]
    subprocess.run([sys.executable, *model], cwd=folder, check=True, stdout=sys.stderr)
    made = [f"{key}={folder / 'outputs' / name / part}" for key, part in expected.folders]
    words = [word for text in (f"seed={seed}", *made, *overrides) for word in ("--set", text)]
    root = folder / "runs" / f"{load_recipe(recipe).recipe.name}-001"
    if root.exists():
        return {"recipe": recipe, "seed": seed, **measured(RunDir(root), expected)}
    watch = MemoryWatch(root)
    watch.start()
    start = time.monotonic()
    command = ["submit", recipe, "-p", "local", "--run-dir", str(root), "--follow", *words]
    subprocess.run(
        [sys.executable, "-m", "primerl_hpc", *command],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "PRIMERL_HOME": str(folder / "state"),
        },
        stdout=sys.stderr,
        check=False,
    )
    wall_s = time.monotonic() - start
    watch.ended.set()
    watch.join()
    return {
        "recipe": recipe,
        "seed": seed,
        **measured(RunDir(root), expected),
        "wall_s": round(wall_s, 1),
        "memory_peak_gib": round(watch.peak_bytes / 2**30, 2),
    }


def measured(run: RunDir, expected: Expected) -> dict[str, object]:
    evaluations = {
        version: row["eval/held-out/reward/mean"] for version, row in read_steps(run.metrics("eval")).items()
    }
    rows = list(read_steps(run.metrics("trainer")).values())[-3:]
    kl = sum(row["mismatch_kl/all/mean"] for row in rows) / len(rows) if rows and expected.kl_max else None
    batches = read_steps(run.metrics("orchestrator")).values()
    scores = [evaluations[version] for version in sorted(evaluations)] or [float("nan")]
    before, after = scores[0], scores[-1]
    state = take_snapshot(run).state
    is_met = (
        state == RunState.DONE
        and before <= expected.before_max
        and after >= max(expected.after_min, before + expected.rise)
        and (kl is None or expected.kl_max is None or kl <= expected.kl_max)
    )
    return {
        "state": state,
        "held_out": {version: round(value, 3) for version, value in evaluations.items()},
        "before": before,
        "after": after,
        "mismatch_kl_last_3": kl,
        "age_max": max((row.get("off_policy/max", 0) for row in batches), default=None),
        "is_met": is_met,
    }


def in_order(recipes: list[str]) -> list[str]:
    """Return the recipes, each after the recipes it depends on."""
    wanted = {need for recipe in recipes if (need := EXPECTED[recipe].needs)} | set(recipes)
    return [recipe for recipe in EXPECTED if recipe in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recipes",
        nargs="+",
        choices=EXPECTED,
        default=list(EXPECTED),
        metavar="RECIPE",
        help=", ".join(EXPECTED),
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--folder", type=Path, help="keep everything here [default: a temporary folder]")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for seed in options.seeds:
            folder = (options.folder or Path(temporary)).resolve() / f"seed-{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            for recipe in in_order(options.recipes):
                rows.append(run_recipe(recipe, seed, folder, options.overrides))
                print(json.dumps(rows[-1]), flush=True)
    print(
        f"\n{'recipe':<26}{'seed':>5}{'wall s':>8}{'GiB':>6}{'before':>8}{'after':>7}{'KL':>9}{'age':>4}  as expected"
    )
    for row in rows:
        kl = "" if row["mismatch_kl_last_3"] is None else f"{row['mismatch_kl_last_3']:.1e}"
        print(
            f"{row['recipe']:<26}{row['seed']:>5}{row.get('wall_s', ''):>8}"
            f"{row.get('memory_peak_gib', ''):>6}{row['before']:>8.3f}"
            f"{row['after']:>7.3f}{kl:>9}{row['age_max'] or 0:>4}  {'yes' if row['is_met'] else 'NO'}"
        )
    return 0 if all(row["is_met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
