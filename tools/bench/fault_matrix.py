#!/usr/bin/env python3
"""A run whose processes are killed and frozen again and again: does it end, and is every rollout accounted for?

    tools/bench/fault_matrix.py                                 # 20 faults of serving processes in 30 steps
    tools/bench/fault_matrix.py --faults 4 --steps 8 --seed 7 --json
    tools/bench/fault_matrix.py --learners --steps 12           # trainer, then orchestrator, each followed by a resume

The whole run is real (vLLM on CPU, router, verifiers, torchrun), the tiny recipe as opd, so that there is a teacher. Engine,
router, environment server and teacher each get SIGKILL and SIGSTOP in a random order, each after a finished rollout and a
random moment, and two of the same process with a step in between: a run ends after too many without progress. `noticed` is
from the signal to the supervisor's first word about it, `ready` to the successor's readiness, `rollout` to the next finished
rollout after that.

With --learners recovery inside the allocation is off, and who is killed ends the attempt: `ended` is from the kill to the
run's own word that it failed, `gone` to the end of its last process, `left` how many were there half a minute later. After
each the run is resumed, at last to its end.

Exits with 1 when the run does not end well, something else was restarted, something is lost or counted twice, fewer faults
fitted than were asked for, or a killed learner left a process or no failure.json, or ended its run after more than 30 s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import ROOT, conclude

sys.path.insert(0, str(ROOT))
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.observe.snapshot import take_snapshot
from tests.e2e.accounts import contradictions
from tests.e2e.faults import DEPTHS, SIGNALS, strike
from tests.e2e.runs import TINY, command, events, last_step, process_of, processes_of, wait_in_run
from tests.support import is_alive

HEALTH_S = 20
SETTINGS = (
    "warmup=null",
    "environments.eval=[]",
    "rollouts.batch_size=192",  # a step takes longer than the pause before a fault, so that as many faults fit
    "checkpoint.interval=5",
    f"timeouts.health_s={HEALTH_S}",
    "timeouts.weight_update_s=60",
)
LEARNERS = {"trainer-0": 2, "orchestrator-0": 1}
"""And how far below its guard the process is that gets the signal."""
ENDS_WITHIN_S, GONE_WITHIN_S = 30.0, 30.0


def make_schedule(count: int, seed: int) -> list[tuple[str, str]]:
    """Every process with every kind of fault as often as any other, to within one, in a random order."""
    every = list(itertools.product(DEPTHS, SIGNALS))
    chance = random.Random(seed)
    schedule: list[tuple[str, str]] = []
    while len(schedule) < count:
        schedule += chance.sample(every, min(len(every), count - len(schedule)))
    return schedule


def one_fault(run: RunDir, process: str, kind: str, pause_s: float) -> dict[str, Any]:
    time.sleep(pause_s)
    step, fault = last_step(run), strike(run, process, kind)
    wait_in_run(run, lambda: fault.noticed(run), f"{process} ({kind}) is noticed")
    wait_in_run(run, lambda: fault.mended(run), f"the successor of {process} ({kind})")
    size = run.traces("train").stat().st_size
    wait_in_run(
        run, lambda: run.traces("train").stat().st_size != size or last_step(run) > step + 1, "a rollout"
    )
    row = {
        "fault": f"{kind} {process}",
        "after step": step,
        "noticed s": fault.noticed(run)["time"] - fault.time,
        "ready s": fault.mended(run)["time"] - fault.time,
        "rollout s": time.time() - fault.time,
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learners", action="store_true", help="kill trainer and orchestrator instead")
    parser.add_argument("--keep", type=Path, help="folder for the run, kept; default: a temporary one")
    parser.add_argument("--json", dest="as_json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-faults-") as temporary:
        folder = options.keep or Path(temporary)
        os.environ["PRIMERL_HOME"] = str(folder / "state")
        if options.learners:
            rows, lost = measure_learners(folder, options.steps)
        else:
            rows, lost = measure(folder, options.faults, options.steps, options.seed)
    what = f"{len(rows)} faults in a run of {options.steps} steps, seed {options.seed}, health_s {HEALTH_S}"
    return conclude(what, rows, lost, as_json=options.as_json)


def submit(folder: Path, steps: int, *more: str) -> RunDir:
    tiny, run = folder / "tiny", RunDir(folder / "run")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [sys.executable, str(ROOT / "tools" / "tiny-model"), str(tiny)], check=True, stdout=sys.stderr
    )
    settings = (f"model.name={tiny}/model", f"max_steps={steps}", *SETTINGS, *more)
    words = [word for text in settings for word in ("--set", text)]
    command("submit", str(TINY), "-p", "local", "--run-dir", str(run.root), *words, cwd=folder)
    return run


def ended(run: RunDir, timeout_s: float = 900.0) -> list[str]:
    """What is wrong with the end of the run, and with what it left."""
    deadline = time.monotonic() + timeout_s
    while not take_snapshot(run).state.is_final and time.monotonic() < deadline:
        time.sleep(0.5)
    state = take_snapshot(run).state
    if not state.is_final:
        return [f"the run is {state.value} after {timeout_s:.0f} s"]
    return ([] if state.value == "done" else [f"the run is {state.value}"]) + contradictions(run)


def cancel(run: RunDir) -> None:
    if read_json_or_none(run.state) is not None and not take_snapshot(run).state.is_final:
        command("cancel", str(run.root), "--now", "--wait", cwd=run.root.parent)


def measure(folder: Path, faults: int, steps: int, seed: int) -> tuple[list[dict[str, Any]], list[str]]:
    """A row per fault, and what is wrong after the end."""
    teacher = f"{{model: {{name: {folder}/tiny/model, dtype: float32}}, inference: {{kv_cache_gib: 0.125}}}}"
    run = submit(folder, steps, "algorithm={type: opd}", f"teacher={teacher}")
    chance = random.Random(seed)
    struck = dict.fromkeys(DEPTHS, 0)  # the last step before each process was last struck
    try:
        rows = []
        for process, kind in make_schedule(faults, seed):
            wait_in_run(run, lambda process=process: last_step(run) > struck[process], "a step")
            if last_step(run) >= steps - 2:
                break  # the run was faster than its faults
            row = one_fault(run, process, kind, chance.uniform(0, 2))
            struck[process] = row["after step"]
            rows.append(row)
        lost = ended(run)
    finally:
        cancel(run)
    if len(rows) < faults:
        lost.append(f"{len(rows)} of {faults} faults fitted into {steps} steps")
    restarts = len(events(run, "role_restarting"))
    if restarts != len(rows):
        lost.append(f"{restarts} restarts after {len(rows)} faults")
    return rows, lost


def measure_learners(folder: Path, steps: int) -> tuple[list[dict[str, Any]], list[str]]:
    """A row per learner, and what is wrong after the end."""
    run = submit(folder, steps, "recovery.in_place=false", "checkpoint.interval=2")
    try:
        rows, lost = [], []
        for process, depth in LEARNERS.items():
            rows.append(kill_learner(run, process, depth))
            lost += faults_of(rows[-1])
            command("resume", str(run.root), cwd=folder)
        return rows, lost + ended(run)
    finally:
        cancel(run)


def kill_learner(run: RunDir, process: str, depth: int) -> dict[str, Any]:
    saved = run.latest_checkpoint() or 0
    wait_in_run(run, lambda: (run.latest_checkpoint() or 0) > saved, "a checkpoint")
    step, before = last_step(run), processes_of(run.root)
    process_of(run.root, process, depth).kill()
    killed = time.monotonic()
    while not take_snapshot(run).state.is_final and time.monotonic() - killed < 10 * ENDS_WITHIN_S:
        time.sleep(0.1)
    ended_s = time.monotonic() - killed
    while (left := sum(map(is_alive, before))) and time.monotonic() - killed < ended_s + GONE_WITHIN_S:
        time.sleep(0.1)
    row = {
        "fault": f"kill {process}",
        "after step": step,
        "ended s": ended_s,
        "gone s": time.monotonic() - killed,
        "left": left,
        "failure.json": (read_json_or_none(run.failure) or {}).get("process", "none"),
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def faults_of(row: dict[str, Any]) -> list[str]:
    found = []
    if row["ended s"] > ENDS_WITHIN_S:
        found.append(f"{row['fault']}: the run ended after {row['ended s']:.0f} s")
    if row["left"]:
        found.append(f"{row['fault']}: {row['left']} processes are left")
    if row["failure.json"] != row["fault"].split()[1]:
        found.append(f"{row['fault']}: failure.json names {row['failure.json']}")
    return found


if __name__ == "__main__":
    sys.exit(main())
