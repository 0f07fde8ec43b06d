#!/usr/bin/env python3
"""Compare the simulator with real runs: step time, idle shares of both sides, staleness.

    tools/tiny-model outputs/tiny && tools/bench/simulator_truth.py --model outputs/tiny/model
    tools/bench/simulator_truth.py --model outputs/tiny/model --layouts tail --steps 12 --json

Each layout is a complete run on this machine: supervisor, orchestrator, router, environment servers and the run
directory are real. Engines and trainer are `rated_roles.py`: engines with a given rate t(b) and distribution of
lengths, a trainer that takes a fixed time per batch. So the comparison covers the scheduling and its delays, not the
speed of vLLM or of the trainer. The real runs take two to ten minutes each, six at a time. On a machine that is
shared, start this with real-time priority: the roles use little CPU time, but need it when they ask for it.

    chrt --rr 5 tools/bench/simulator_truth.py --model outputs/tiny/model --json > simulator_truth.json

Compared are the steps after the first quarter, without the last ones: a run stops to start rollouts when its last
batches are complete, so these wait for their longest rollouts, and the simulation is of an endless run. Both sides
draw lengths without replacement from the same deck.

Required of the mean of three runs of every layout: step time within 5 %, both idle shares within 5 points, mean
staleness within 0.3. Exits with 1 otherwise. The simulator gets the nominal rates and, from one calibration run
(constant lengths), three overheads of this machine: seconds of a rollout outside of the engine,
from a cut batch to the trainer, and of a weight update beyond the pause.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from machine import describe_machine, show  # noqa: E402
from rated_roles import DealtLengths, coarse_lengths  # noqa: E402

from primerl_hpc.plan.simulation.sides import EngineSide, TrainerSide, Workload  # noqa: E402
from primerl_hpc.plan.simulation.simulate import simulate  # noqa: E402
from primerl_hpc.run.metrics import read_steps  # noqa: E402
from primerl_hpc.run.rundir import RunDir  # noqa: E402

RUN_TIMEOUT_S = 1800.0
NUM_RUNS = 3
"""Runs of each layout, whose means are compared: in one run of 20 steps the step time has a standard deviation of 2 %,
and the idle share of engines, bound by the trainer, of 5 points."""
PARALLEL = 6
APART_S = 15.0
"""Between the first starts: processes that start use much CPU time."""
CALIBRATION_STEPS = 12
CURVE = ((1.0, 0.010), (16.0, 0.016), (64.0, 0.040))
"""Rate of the engines: (running sequences, seconds per token)."""
BATCH_POLL_S = 0.11
"""Mean delay until the waiting trainer sees a batch: it looks every 0.25 s at most (`trainer.control.MAX_POLL_S`)."""
STEP_SHARE, IDLE_POINTS, STALENESS = 0.05, 0.05, 0.3  # required


@dataclass(frozen=True)
class TruthLayout:
    """One run. A rollout has ``mean_tokens`` on average."""

    name: str
    engines: int = 2
    max_running: int = 16
    batch_size: int = 24
    group_size: int = 4
    max_in_flight: int = 32
    window: int = 2
    mean_tokens: float = 500.0
    cv: float = 1.0
    trainer_s: float = 6.0
    pause_s: float = 1.0
    turns: int = 1

    @property
    def rates(self) -> dict[str, Any]:
        names = ("max_running", "mean_tokens", "cv", "trainer_s", "pause_s", "turns")
        own = {name: getattr(self, name) for name in names}
        return {**own, "curve": CURVE}

    def compared(self, steps: int) -> slice:
        """Return the steps whose rollouts started while the run still filled later batches."""
        return slice(steps // 4, steps - self.window - 1)


LAYOUTS = (
    TruthLayout("balanced"),
    TruthLayout("trainer-bound", trainer_s=12.0, window=3),
    TruthLayout("engine-bound", engines=1, trainer_s=2.0, window=3),
    TruthLayout("synchronous", window=0, max_in_flight=24),
    TruthLayout("tail", cv=1.5, window=1, trainer_s=8.0),
    TruthLayout("constant", engines=3, cv=0.0, window=2, trainer_s=5.0, max_in_flight=48),
)


@dataclass(frozen=True)
class Overheads:
    """Seconds that this machine adds, from the calibration run."""

    rollout_s: float = 0.0
    deliver_s: float = 0.0
    update_s: float = 0.0


def simulated(layout: TruthLayout, overheads: Overheads, steps: int, seed: int = 0) -> dict[str, float]:
    workload = Workload(
        layout.batch_size,
        layout.group_size,
        layout.max_in_flight,
        layout.window,
        DealtLengths(coarse_lengths(layout.mean_tokens, layout.cv).values * layout.engines),
        turns=layout.turns,
        env_s=overheads.rollout_s,
    )
    engines = EngineSide(
        layout.engines,
        CURVE,
        layout.max_running,
        pause_s=layout.pause_s + overheads.update_s,
        routing="least_busy",  # the prompts are shorter than a block of the router
        detect_s=0.1,  # the watcher reads the folder every 0.2 s
    )
    trainer = TrainerSide(layout.trainer_s, deliver_s=overheads.deliver_s)
    # several seeds: a real run is one sample, the mean of the distribution is what a plan can predict
    last = layout.compared(steps)
    runs = [
        simulate(workload, engines, trainer, steps=last.stop, warm_up=last.start, seed=seed + number)
        for number in range(16)
    ]
    return {
        "step_s": statistics.mean(run.step_s for run in runs),
        "trainer_idle": statistics.mean(run.trainer_idle for run in runs),
        "engine_idle": statistics.mean(run.engine_idle for run in runs),
        "staleness": statistics.mean(run.staleness_mean for run in runs),
    }


def measured(layout: TruthLayout, model: Path, steps: int, seed: int, folder: Path) -> dict[str, float]:
    """Run the layout and return the means over the compared steps."""
    run = start_run(layout, model, steps, seed, folder)
    trainer = list(read_steps(run.metrics("trainer")).values())[layout.compared(steps)]
    batches = list(read_steps(run.metrics("orchestrator")).values())[layout.compared(steps)]
    step_s = sum(row["time/step"] for row in trainer) / len(trainer)
    updates = [row["time/weight_update"] for row in batches if "time/weight_update" in row]
    return {
        "step_s": step_s,
        "trainer_idle": sum(row["time/wait_for_batch"] for row in trainer) / step_s / len(trainer),
        "engine_idle": engine_idle(folder, trainer[0]["time"] - trainer[0]["time/step"], trainer[-1]["time"]),
        "staleness": statistics.mean(row["off_policy/mean"] for row in batches),
        "staleness_max": max(row["off_policy/max"] for row in batches),
        "rollout_s": statistics.mean(row["rollout_s/mean"] for row in batches),
        "in_engine_s": in_engine_s(folder) * layout.turns,
        "deliver_s": statistics.mean(row["time/pack"] + row["time/send"] for row in batches),
        "update_s": statistics.mean(updates) if updates else 0.0,
    }


def engine_idle(folder: Path, start: float, end: float) -> float:
    """Return the share of engine time without a running sequence, by the engines' own clocks.

    ``inference/idle`` of a run has the same mean, but is polled every few seconds: 5 points of noise in 20 steps.
    """
    reports = [json.loads(path.read_text()) for path in folder.glob("inference-*.json")]
    idle_s = sum(seconds for report in reports for at, seconds in report["idle"] if start < at <= end)
    return idle_s / (end - start) / len(reports)


def in_engine_s(folder: Path) -> float:
    """Return the mean time of a request in an engine, as the engines of the run report it."""
    reports = [json.loads(path.read_text()) for path in folder.glob("inference-*.json")]
    return sum(report["seconds"] for report in reports) / sum(report["requests"] for report in reports)


def start_run(layout: TruthLayout, model: Path, steps: int, seed: int, folder: Path) -> RunDir:
    folder.mkdir(parents=True)
    rates, python = folder / "rates.json", folder / "python"
    rates.write_text(json.dumps({**layout.rates, "seed": seed}))
    roles = "primerl_hpc.roles.inference|primerl_hpc.roles.trainer"
    bench = Path(__file__).resolve().parent / "rated_roles.py"
    python.write_text(
        f'#!/bin/sh\ncase "$2" in\n{roles}) exec {sys.executable} {bench} "$@";;\nesac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    environment = {"id": "reverse-text"}
    if layout.turns > 1:
        environment = {"id": "alphabet-sort", "args": {"turns": layout.turns, "names_per_turn": 1}}
    recipe = {
        "kind": "rl",
        "name": layout.name,
        "model": {"name": str(model.resolve()), "dtype": "float32", "renderer": {"name": "chatml"}},
        "seq_len": 512,
        "max_steps": steps,
        "seed": seed,
        "layout": {"inference": {"replicas": layout.engines}, "trainer": {"ranks": 1}},
        "environments": {"train": [environment]},
        "rollouts": {
            "batch_size": layout.batch_size,
            "group_size": layout.group_size,
            "max_in_flight": layout.max_in_flight,
            "max_off_policy_steps": layout.window,
            "zero_advantage": "keep",
            "sampling": {"max_tokens": 16},
        },
        "checkpoint": {"at_end": False},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    own = [f"software.roles.{role}.python={python}" for role in ("inference", "trainer")]
    words = [word for change in own for word in ("--profile-set", change)]
    root = folder / "run"
    with (folder / "log").open("w") as log:
        subprocess.run(
            [
                *(sys.executable, "-m", "primerl_hpc", "submit", "recipe.yaml", "-p", "local"),
                *("--profile-set", f"node.cpu_slots={layout.engines + 1}"),
                *(*words, "--run-dir", str(root), "--follow"),
            ],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "RATED": str(rates),
                "PRIMERL_HOME": str(folder / "state"),
            },
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=RUN_TIMEOUT_S,
            check=True,
        )
    return RunDir(root)


def calibrate(model: Path, steps: int, folder: Path) -> Overheads:
    """Return the overheads of this machine, by a run whose figures are not compared.

    All rollouts have the same length: otherwise the long ones, which are missing among the finished, bias the means.
    """
    layout = TruthLayout("calibration", cv=0.0)
    real = measured(layout, model, steps, seed=1000, folder=folder)
    return Overheads(
        rollout_s=max(0.0, real["rollout_s"] - real["in_engine_s"]),
        deliver_s=real["deliver_s"] + BATCH_POLL_S,
        update_s=max(0.0, real["update_s"] - layout.pause_s),
    )


def run_all(
    layouts: list[TruthLayout], model: Path, steps: int, folder: Path
) -> tuple[Overheads, list[dict[str, Any]]]:
    """Run the calibration, then the layouts, `PARALLEL` runs at a time. Return the overheads and a row per layout."""
    overheads = calibrate(model, CALIBRATION_STEPS, folder / "calibration")
    runs: dict[str, list[Future[dict[str, float]]]] = {layout.name: [] for layout in layouts}
    with ThreadPoolExecutor(PARALLEL) as pool:
        for layout in sorted(layouts, key=lambda layout: layout.window):  # the longest first
            for seed in range(NUM_RUNS):
                time.sleep(APART_S)
                where = folder / f"{layout.name}-{seed}"
                runs[layout.name].append(pool.submit(measured, layout, model, steps, seed, where))
        rows = []
        for layout in layouts:
            found = [run.result() for run in runs[layout.name]]
            means = {name: statistics.mean(real[name] for real in found) for name in found[0]}
            rows.append(compare(layout, means, overheads, steps) | {"runs": found})
        return overheads, rows


def compare(layout: TruthLayout, real: dict[str, float], overheads: Overheads, steps: int) -> dict[str, Any]:
    """Return a row with both sides, and whether the required figures are met."""
    figures = simulated(layout, overheads, steps)
    row: dict[str, Any] = {"layout": layout.name}
    for name, value in figures.items():
        row |= {f"{name} real": real[name], f"{name} sim": value}
    errors = {
        "step": figures["step_s"] / real["step_s"] - 1,
        "trainer": figures["trainer_idle"] - real["trainer_idle"],
        "engines": figures["engine_idle"] - real["engine_idle"],
        "stale": figures["staleness"] - real["staleness"],
    }
    limits = {"step": STEP_SHARE, "trainer": IDLE_POINTS, "engines": IDLE_POINTS, "stale": STALENESS}
    row |= {f"{name} error": value for name, value in errors.items()}
    row["met"] = all(abs(errors[name]) <= limit for name, limit in limits.items())
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="model folder created by tools/tiny-model")
    parser.add_argument("--layouts", nargs="+", default=[layout.name for layout in LAYOUTS])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--keep", type=Path, help="empty folder in which the run directories stay")
    parser.add_argument("--json", dest="as_json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="simulator-truth-") as temporary:
        folder = options.keep or Path(temporary)
        layouts = [layout for layout in LAYOUTS if layout.name in options.layouts]
        overheads, rows = run_all(layouts, options.model, options.steps, folder)
    if options.as_json:
        found = {"what": "simulator against real runs", **describe_machine(), "overheads": vars(overheads)}
        print(json.dumps({**found, "steps": options.steps, "rows": rows}, indent=1))
    else:
        show(f"simulator against real runs, overheads {overheads}", rows, as_json=False)
    return 0 if all(row["met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
