#!/usr/bin/env python3
"""Kill and freeze processes of a run repeatedly, and check that it finishes and that every rollout is accounted for.

    tools/bench/fault_matrix.py                                 # 20 faults of serving processes in 30 steps
    tools/bench/fault_matrix.py --faults 4 --steps 8 --seed 7 --json
    tools/bench/fault_matrix.py --learners --steps 12           # trainer, then orchestrator, each followed by a resume
    tools/bench/fault_matrix.py --random --runs 4 --steps 20    # a random process every 15 to 35 s, until the run ends

The run is complete and real (vLLM on CPU, router, verifiers, torchrun): the tiny recipe with algorithm opd, so that it
has a teacher. Engine, router, environment server and teacher each receive SIGKILL and SIGSTOP in a random order, each
after a finished rollout and a random delay. Two faults of the same process have a step between them, because a run ends
after too many failures without progress. `noticed` is the time from the signal to the supervisor's first event about
it, `ready` until the restarted process is ready, `rollout` until the next finished rollout.

With --learners, recovery inside the allocation is disabled, so that the kill ends the attempt: `ended` is the time from
the kill until the run has reported its failure, `gone` until its last process has exited, `left` the number of
processes half a minute later. The run is resumed after each kill, at last until its end.

With --random, a process of a randomly drawn role receives SIGKILL every 15 to 35 s (--every) from the first finished
step until the end of the run: the role's process or one below it, never the supervisor. One row per run: its final
state, the kills by role, and the recoveries of trainer and orchestrator. Nothing is resumed.

Exits with 1 if a run does not finish, another process was restarted, something is lost or counted twice, fewer faults
than requested were injected, or a killed learner left a process or no failure.json, or its run took more than 30 s to
end.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import ROOT, conclude

sys.path.insert(0, str(ROOT))
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.run.rundir import RunDir
from tests.support.accounts import contradictions
from tests.support.faults import DEPTHS, SIGNALS, strike
from tests.support.helpers import is_alive
from tests.support.runs import TINY, command, events, last_step, process_of, processes_of, wait_in_run

HEALTH_S = 20
SETTINGS = (
    "warmup=null",
    "environments.eval=[]",
    "rollouts.batch_size=192",  # steps longer than the delay before a fault, so that all faults fit
    "checkpoint.interval=5",
    f"timeouts.health_s={HEALTH_S}",
    "timeouts.weight_update_s=60",
)
LEARNERS = {"trainer-0": 2, "orchestrator-0": 1}
"""Roles, and the depth below their guard of the process that receives the signal."""
ENDS_WITHIN_S, GONE_WITHIN_S = 30.0, 30.0
RANDOM_RUN_S = 1500.0
"""A randomly killed run that has not ended after this time counts as not finished."""


def make_schedule(count: int, seed: int) -> list[tuple[str, str]]:
    """Return pairs of process and fault in random order, each equally often to within one."""
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
    wait_in_run(run, lambda: fault.replaced(run), f"the successor of {process} ({kind})")
    size = run.traces("train").stat().st_size
    wait_in_run(
        run, lambda: run.traces("train").stat().st_size != size or last_step(run) > step + 1, "a rollout"
    )
    row = {
        "fault": f"{kind} {process}",
        "after step": step,
        "noticed s": fault.noticed(run)["time"] - fault.time,
        "ready s": fault.replaced(run)["time"] - fault.time,
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
    parser.add_argument("--random", action="store_true", help="kill random processes instead")
    parser.add_argument("--runs", type=int, default=4, help="number of runs with --random")
    parser.add_argument(
        "--every",
        type=float,
        nargs=2,
        default=(15.0, 35.0),
        metavar="S",
        help="shortest and longest time between two kills with --random; increase it on a busy machine",
    )
    parser.add_argument("--keep", type=Path, help="keep the run in this folder [default: a temporary folder]")
    parser.add_argument("--json", dest="as_json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-faults-") as temporary:
        folder = options.keep or Path(temporary)
        os.environ["PRIMERL_HOME"] = str(folder / "state")
        if options.random:
            rows, lost = measure_random(folder, options.runs, options.steps, options.seed, options.every)
            first, last = options.every
            what = (
                f"{options.runs} runs of {options.steps} steps, a random process killed every {first:g} to {last:g} s, "
                f"seed {options.seed}"
            )
            return conclude(what, rows, lost, as_json=options.as_json)
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
    """Return the errors in the final state of the run and in what it left behind."""
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
    """Return one row per fault, and the errors at the end."""
    teacher = f"{{model: {{name: {folder}/tiny/model, dtype: float32}}, inference: {{kv_cache_gib: 0.125}}}}"
    run = submit(folder, steps, "algorithm={type: opd}", f"teacher={teacher}")
    chance = random.Random(seed)
    struck = dict.fromkeys(DEPTHS, 0)  # the last step before the last fault of each process
    try:
        rows = []
        for process, kind in make_schedule(faults, seed):
            wait_in_run(run, lambda process=process: last_step(run) > struck[process], "a step")
            if last_step(run) >= steps - 2:
                break  # the run finished before all faults were injected
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
    """Return one row per learner, and the errors at the end."""
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


def measure_random(
    folder: Path, runs: int, steps: int, seed: int, every_s: Sequence[float]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return one row per run killed at random until its end, and the errors at the end of each."""
    rows, lost = [], []
    for number in range(runs):
        run = submit(folder / str(number), steps, "rollouts.batch_size=96", "layout.trainer.ranks=1")
        try:
            rows.append(kill_at_random(run, random.Random(seed + number), every_s))
            state = rows[-1]["state"]
            wrong = contradictions(run) if state == "done" else [f"the run is {state}"]
            lost += [f"run {number}: {each}" for each in wrong]
        finally:
            cancel(run)
    return rows, lost


def kill_at_random(run: RunDir, chance: random.Random, every_s: Sequence[float]) -> dict[str, Any]:
    """Kill random processes until the run ends, or for `RANDOM_RUN_S`."""
    began, killed = time.monotonic(), Counter[str]()
    wait_in_run(run, lambda: last_step(run) > 0, "the first step")
    while time.monotonic() - began < RANDOM_RUN_S:
        next_kill = time.monotonic() + chance.uniform(*every_s)
        while time.monotonic() < next_kill and not take_snapshot(run).state.is_final:
            time.sleep(0.2)
        if take_snapshot(run).state.is_final:
            break
        victims = victims_of(run)
        if role := chance.choice(sorted(victims)) if victims else None:
            with contextlib.suppress(psutil.NoSuchProcess):
                chance.choice(victims[role]).kill()
                killed[role] += 1
                print(f"killed {role} after step {last_step(run)}", file=sys.stderr, flush=True)
    row = {
        "state": take_snapshot(run).state.value,
        "step": last_step(run),
        "kills": killed.total(),
        "of": ", ".join(f"{role} {count}" for role, count in sorted(killed.items())),
        "recoveries": len(events(run, "recovery_started")),
        "restarts": len(events(run, "role_restarting")),
        "failure": str((read_json_or_none(run.failure) or {}).get("reason", "")),
        "seconds": round(time.monotonic() - began),
        "load": round(os.getloadavg()[2], 1),
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def victims_of(run: RunDir) -> dict[str, list[psutil.Process]]:
    """Return the processes below the guard of each role."""
    found = {}
    for process in processes_of(run.root):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if "primerl_hpc.runtime.steps.guard" in words and (below := process.children(recursive=True)):
                found[words[-1]] = below
    return found


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
