#!/usr/bin/env python3
"""Asynchronous against synchronous, same recipe, same machine: how soon is the policy as good, and who waits?

    tools/bench/async_vs_sync.py                                # the tiny recipe's own lag, then 0
    tools/bench/async_vs_sync.py --lags 4 0 --target 0.8 --json

Two whole runs of the tiny recipe on CPU, one after the other, from one warm model, with `max_off_policy_steps` as each
line says. `to target s` is from the start of the first rollout to the step whose reward, as the mean of the last three
batches, first reaches the target. `trainer waits` is the share of the trainer's time without a batch, `engines idle` how
often an engine had no request, `update s` a new policy's way to the engines, as the median: all from the runs' own metrics.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import ROOT, show

sys.path.insert(0, str(ROOT))
from primerl_hpc.common.metrics import read_steps
from primerl_hpc.common.rundir import RunDir
from tests.e2e.runs import SFT_RECIPE, TINY, command
from tests.support import make_tiny_model

WINDOW = 3
SLOW_S = 3600.0


def submit(folder: Path, recipe: Path, name: str, *settings: str) -> RunDir:
    words = [word for text in settings for word in ("--set", text)]
    run_dir = f"runs/{name}"
    command(
        *("submit", str(recipe), "-p", "local", "--run-dir", run_dir, *words, "--follow"),
        cwd=folder,
        timeout_s=SLOW_S,
    )
    return RunDir(folder / run_dir)


def row_of(run: RunDir, lag: int, target: float) -> dict[str, Any]:
    trainer = list(read_steps(run.metrics("trainer")).values())
    batches = list(read_steps(run.metrics("orchestrator")).values())
    started = batches[0]["time"] - batches[0]["time/step"]
    rewards = [row["reward/mean"] for row in batches]
    means = [statistics.mean(rewards[max(0, end - WINDOW) : end]) for end in range(1, len(rewards) + 1)]
    reached = next((place for place, mean in enumerate(means) if mean >= target), None)
    looked = [row for row in batches if "inference/idle" in row]
    updates = [row["time/weight_update"] for row in batches if "time/weight_update" in row]
    return {
        "max_off_policy_steps": lag,
        f"to {target:g} s": float("nan") if reached is None else batches[reached]["time"] - started,
        "steps to it": float("nan") if reached is None else reached + 1,
        "all steps s": batches[-1]["time"] - started,
        "last reward": means[-1],
        "trainer waits": _share(trainer, "time/wait_for_batch"),
        "engines idle": sum(row["inference/idle"] * row["time/step"] for row in looked)
        / sum(row["time/step"] for row in looked),
        "update s": statistics.median(updates),
        "age max": max(row["off_policy/max"] for row in batches),
    }


def _share(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / sum(row["time/step"] for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lags", type=int, nargs="+", default=[2, 0], help="max_off_policy_steps of each run"
    )
    parser.add_argument("--target", type=float, default=0.85, help="mean reward of training rollouts")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", dest="as_json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-async-") as temporary:
        folder = Path(temporary)
        os.environ["PRIMERL_HOME"] = str(folder / "state")
        data = make_tiny_model(folder / "outputs" / "tiny", rows=20_000) / "sft.jsonl"
        sft = folder / "sft.yaml"
        sft.write_text(SFT_RECIPE.format(tiny=TINY, data=data))
        warm = submit(folder, sft, "warm").weights_step(300)
        fixed = (f"model.name={warm}", "warmup=null", "environments.eval=[]", f"max_steps={options.steps}")
        rows = []
        for lag in options.lags:
            settings = (*fixed, "checkpoint.interval=null", f"rollouts.max_off_policy_steps={lag}")
            run = submit(folder, TINY, f"lag-{lag}", *settings)
            rows.append(row_of(run, lag, options.target))
    show("asynchronous against synchronous", rows, as_json=options.as_json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
