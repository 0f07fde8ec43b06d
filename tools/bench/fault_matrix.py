#!/usr/bin/env python3
"""Kill and freeze processes of a run repeatedly, and check that it finishes and that every rollout is accounted for.

    tools/bench/fault_matrix.py                                 # 20 faults of serving processes in 30 steps
    tools/bench/fault_matrix.py --faults 4 --steps 8 --seed 7 --json
    tools/bench/fault_matrix.py --random --runs 4 --steps 20    # a random process every 15 to 35 s, until the run ends
    tools/bench/fault_matrix.py --chain --every 30 55           # the same with supervisors and guards, chains of 6 jobs

The run is complete and real (vLLM on CPU, router, verifiers, torchrun): the tiny recipe with algorithm opd, so that it
has a teacher. Engine, router, environment server and teacher each receive SIGKILL and SIGSTOP in a random order, each
after a finished rollout and a random delay. Two faults of the same process have a step between them, because a run ends
after too many failures without progress. `noticed` is the time from the signal to the supervisor's first event about
it, `ready` until the restarted process is ready, `rollout` until the next finished rollout.

With --random, a process of a randomly drawn role receives SIGKILL every 15 to 35 s (--every) from the first finished
step until the end of the run: the role's process or one below it, never the supervisor. One row per run: its final
state, the kills by role, and the recoveries of trainer and orchestrator. Nothing is resumed.

With --chain, which needs root, each run is a chain of 6 jobs on a virtual cluster (tools/virtual-cluster), and any
process of the run is killed but srun: also supervisors and guards.

Exits with 1 if a run does not finish, another process was restarted, something is lost or counted twice, or fewer
faults than requested were injected.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import ROOT, conclude

sys.path.insert(0, str(ROOT))
from primerl_hpc.common.document import dump_yaml, load_yaml
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.run.rundir import RunDir
from tests.support.accounts import contradictions
from tests.support.faults import DEPTHS, SIGNALS, strike
from tests.support.real_slurm import RealRun
from tests.support.runs import TINY, command, events, last_step, processes_of, wait_in_run
from tests.support.virtual_slurm import Cluster

HEALTH_S = 20
SETTINGS = (
    "warmup=null",
    "environments.eval=[]",
    "rollouts.batch_size=192",  # steps longer than the delay before a fault, so that all faults fit
    "checkpoint.interval=5",
    f"timeouts.health_s={HEALTH_S}",
    "timeouts.weight_update_s=60",
)
LINKS = 6
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
    parser.add_argument("--random", action="store_true", help="kill random processes instead")
    parser.add_argument(
        "--chain", action="store_true", help="the same, also supervisors and guards, on SLURM"
    )
    parser.add_argument("--runs", type=int, default=4, help="number of runs with --random or --chain")
    parser.add_argument(
        "--every",
        type=float,
        nargs=2,
        default=(15.0, 35.0),
        metavar="S",
        help="shortest and longest time between two random kills; increase it on a busy machine",
    )
    parser.add_argument(
        "--interval", type=int, default=5, help="steps between checkpoints of random runs [default: 5]"
    )
    parser.add_argument("--keep", type=Path, help="keep the run in this folder [default: a temporary folder]")
    parser.add_argument("--json", dest="as_json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-faults-") as temporary:
        folder = options.keep or Path(temporary)
        os.environ["PRIMERL_HOME"] = str(folder / "state")
        if options.random or options.chain:
            with virtual_cluster(folder) if options.chain else contextlib.nullcontext():
                rows, lost = measure_random(folder, options)
            first, last = options.every
            runs = f"chains of {LINKS} jobs" if options.chain else "runs"
            what = (
                f"{options.runs} {runs} of {options.steps} steps, a random process killed every "
                f"{first:g} to {last:g} s, seed {options.seed}"
            )
            return conclude(what, rows, lost, as_json=options.as_json)
        rows, lost = measure(folder, options.faults, options.steps, options.seed)
    what = f"{len(rows)} faults in a run of {options.steps} steps, seed {options.seed}, health_s {HEALTH_S}"
    return conclude(what, rows, lost, as_json=options.as_json)


def submit(folder: Path, steps: int, *more: str, words: Sequence[str] = ("-p", "local")) -> RunDir:
    """Submit the tiny recipe. ``more``: settings of the recipe; ``words``: profile and other options."""
    tiny, run = folder / "tiny", RunDir(folder / "run")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [sys.executable, str(ROOT / "tools" / "tiny-model"), str(tiny)], check=True, stdout=sys.stderr
    )
    settings = (f"model.name={tiny}/model", f"max_steps={steps}", *SETTINGS, *more)
    changes = [word for text in settings for word in ("--set", text)]
    command("submit", str(TINY), "--run-dir", str(run.root), *words, *changes, cwd=folder)
    return run


@contextlib.contextmanager
def virtual_cluster(folder: Path) -> Iterator[None]:
    """Start a SLURM cluster of two nodes, whose commands are found first, and write a profile of it."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Cluster(folder / "cluster")
    made.tool("up", "--nodes", "2", "--requeue-delay", "8")
    profile = dict(load_yaml(ROOT / "cluster_profiles" / "virtual.yaml").values)
    (folder / "profile.yaml").write_text(dump_yaml(profile | {"nodes": 2}))
    os.environ["PATH"] = f"{made.folder / 'bin'}:{os.environ['PATH']}"
    try:
        yield
    finally:
        made.tool("down", "--purge")


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


def measure_random(folder: Path, options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Return one row per run killed at random until its end, and the errors at the end of each."""
    rows, lost = [], []
    words = ("-p", str(folder / "profile.yaml"), "--chain", str(LINKS)) if options.chain else ("-p", "local")
    for number in range(options.runs):
        changes = (
            "rollouts.batch_size=96",
            "layout.trainer.ranks=1",
            f"checkpoint.interval={options.interval}",
        )
        run = submit(folder / str(number), options.steps, *changes, words=words)
        try:
            chance = random.Random(options.seed + number)
            rows.append(kill_at_random(run, chance, options.every, has_chain=options.chain))
            state = rows[-1]["state"]
            wrong = contradictions(run) if state == "done" else [f"the run is {state}"]
            lost += [f"run {number}: {each}" for each in wrong]
        finally:
            cancel(run)
    return rows, lost


def kill_at_random(
    run: RunDir, chance: random.Random, every_s: Sequence[float], *, has_chain: bool
) -> dict[str, Any]:
    """Kill random processes until the run ends, or for `RANDOM_RUN_S`."""
    real = RealRun(run.root, "")
    began, killed = time.monotonic(), Counter[str]()
    wait_in_run(run, lambda: last_step(run) > 0, "the first step", real.facts)
    while time.monotonic() - began < RANDOM_RUN_S:
        next_kill = time.monotonic() + chance.uniform(*every_s)
        while time.monotonic() < next_kill and not real.state.is_final:
            time.sleep(0.2)
        if real.state.is_final:
            break
        victims = all_of(run) if has_chain else below_guards(run)
        if name := chance.choice(sorted(victims)) if victims else None:
            with contextlib.suppress(psutil.NoSuchProcess):
                chance.choice(victims[name]).kill()
                killed[name] += 1
                print(f"killed {name} after step {last_step(run)}", file=sys.stderr, flush=True)
    attempts = events(run, "attempt_started")
    row = {
        "state": real.state.value,
        "step": last_step(run),
        "kills": killed.total(),
        "of": ", ".join(f"{name} {count}" for name, count in sorted(killed.items())),
        "jobs": len({str(each.get("job")) for each in attempts}),
        "recoveries": len(events(run, "recovery_started")),
        "restarts": len(events(run, "role_restarting")),
        "failure": str((read_json_or_none(run.failure) or {}).get("reason", "")),
        "seconds": round(time.monotonic() - began),
        "load": round(os.getloadavg()[2], 1),
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def below_guards(run: RunDir) -> dict[str, list[psutil.Process]]:
    """Return the processes below the guard of each role."""
    found = {}
    for process in processes_of(run.root):
        with contextlib.suppress(psutil.NoSuchProcess):
            if is_guard(words := process.cmdline()) and (below := process.children(recursive=True)):
                found[words[-1]] = below
    return found


def all_of(run: RunDir) -> dict[str, list[psutil.Process]]:
    """Return the supervisor, and each role's guard and the processes below it."""
    found: dict[str, list[psutil.Process]] = below_guards(run)
    for process in processes_of(run.root):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if is_guard(words):
                found.setdefault(f"guard of {words[-1]}", []).append(process)
            elif "primerl_hpc.runtime.supervisor" in words and process.name() != "srun":
                found.setdefault("supervisor", []).append(process)
    return found


def is_guard(words: Sequence[str]) -> bool:
    return "primerl_hpc.runtime.steps.guard" in words and not words[0].endswith("srun")


if __name__ == "__main__":
    sys.exit(main())
