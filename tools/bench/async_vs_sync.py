#!/usr/bin/env python3
"""Compare asynchronous and synchronous training of the same recipe: time to a target reward, and idle time of both
sides.

    tools/bench/async_vs_sync.py                                # the lag of the tiny recipe, and 0
    tools/bench/async_vs_sync.py --lags 4 0 --seeds 0 1 2 --target 0.8 --json

Complete runs of the tiny recipe on CPU, one after the other, from the same warmed-up model, with `max_off_policy_steps`
as given in each line; every other seed in reverse order. With several seeds, the last lines are the medians of each
lag.

`to target s` is the time from the start of the first rollout to the step at which the mean reward of the last three
batches first reaches the target. The other columns cover all steps except the first, which includes the startup of
engines and servers: `trainer waits` is the share of the trainer's time without a batch, `engines idle` the share of
polls (every 0.2 s) that found an engine without requests, `update s` the time from detecting a new policy until it is
live and `paused s` the time for which engines were paused, as medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import ROOT, show

sys.path.insert(0, str(ROOT))
import httpx

from primerl_hpc.common.names import Role
from primerl_hpc.orchestrator.engines.fleet import parse_metrics
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.endpoints import read_endpoints
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import make_tiny_model
from tests.support.runs import SFT_RECIPE, TINY, command

WINDOW = 3
POLL_S = 0.2
SLOW_S = 3600.0


class IdleWatch(Thread):
    """Polls the number of requests in a run's engines."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(daemon=True)
        self.run_dir, self.is_over = run, Event()
        self.looks: list[tuple[float, bool]] = []  # time of the poll, and whether the engine was idle

    def run(self) -> None:
        keys = run_keys(self.run_dir)
        with httpx.Client(
            verify=keys.client_context(), headers=keys.headers, timeout=5, trust_env=False
        ) as client:
            while not self.is_over.wait(POLL_S):
                for end in read_endpoints(self.run_dir, Role.INFERENCE.value).values():
                    try:
                        answer = client.get(f"{end['url']}/metrics")
                    except httpx.HTTPError:
                        continue
                    if answer.status_code == 200:
                        running = parse_metrics(answer.text).get("running", 0.0)
                        self.looks.append((time.time(), not running))

    def idle(self, since: float, until: float) -> float | None:
        looks = [is_idle for at, is_idle in self.looks if since <= at <= until]
        return sum(looks) / len(looks) if looks else None


def submit(folder: Path, recipe: Path, name: str, *settings: str) -> tuple[RunDir, IdleWatch]:
    words = [word for text in settings for word in ("--set", text)]
    run = RunDir(folder / "runs" / name)
    watch = IdleWatch(run)
    watch.start()
    try:
        command(
            *("submit", str(recipe), "-p", "local", "--run-dir", f"runs/{name}", *words, "--follow"),
            cwd=folder,
            timeout_s=SLOW_S,
        )
    finally:
        watch.is_over.set()
        watch.join()
    return run, watch


def row_of(run: RunDir, watch: IdleWatch, lag: int, seed: int, target: float) -> dict[str, Any]:
    trainer = list(read_steps(run.metrics("trainer")).values())[1:]
    batches = list(read_steps(run.metrics("orchestrator")).values())
    started = batches[0]["time"] - batches[0]["time/step"]
    rewards = [row["reward/mean"] for row in batches]
    means = [statistics.mean(rewards[max(0, end - WINDOW) : end]) for end in range(1, len(rewards) + 1)]
    reached = next((place for place, mean in enumerate(means) if mean >= target), None)
    return {
        "max_off_policy_steps": lag,
        "seed": seed,
        f"to {target:g} s": None if reached is None else batches[reached]["time"] - started,
        "steps to it": None if reached is None else reached + 1,
        "all steps s": batches[-1]["time"] - started,
        "last reward": means[-1],
        "trainer waits": _sum(trainer, "time/wait_for_batch") / _sum(trainer, "time/step"),
        "engines idle": watch.idle(batches[0]["time"], batches[-1]["time"]),
        "update s": median([row.get("time/weight_update") for row in batches[1:]]),
        "paused s": median([row.get("time/engines_paused") for row in batches[1:]]),
        "age max": max(row["off_policy/max"] for row in batches),
    }


def _sum(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows)


def median(values: Sequence[float | None]) -> float | None:
    """Return the median of the values that are present."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of the runs of one lag. A target that most runs missed counts as not reached."""
    row: dict[str, Any] = {"max_off_policy_steps": rows[0]["max_off_policy_steps"], "seed": "median"}
    for name in list(rows[0])[2:]:
        values = [each[name] for each in rows]
        row[name] = median(values) if 2 * values.count(None) <= len(values) else None
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lags", type=int, nargs="+", default=[2, 0], help="max_off_policy_steps of each run"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
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
        warm, _ = submit(folder, sft, "warm")
        fixed = (
            f"model.name={warm.weights_step(300)}",
            "warmup=null",
            "environments.eval=[]",
            "checkpoint.interval=null",
            f"max_steps={options.steps}",
        )
        rows = []
        for place, seed in enumerate(options.seeds):
            for lag in options.lags if place % 2 == 0 else reversed(options.lags):
                own = (f"rollouts.max_off_policy_steps={lag}", f"seed={seed}")
                run, watch = submit(folder, TINY, f"lag-{lag}-seed-{seed}", *fixed, *own)
                rows.append(row_of(run, watch, lag, seed, options.target))
    if len(options.seeds) > 1:
        rows += [medians([row for row in rows if row["max_off_policy_steps"] == lag]) for lag in options.lags]
    show("asynchronous against synchronous", rows, as_json=options.as_json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
