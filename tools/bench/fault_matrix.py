#!/usr/bin/env python3
"""A run whose serving processes are killed and frozen again and again: does it end, and is every rollout accounted for?

    tools/bench/fault_matrix.py                                 # 20 faults in 30 steps
    tools/bench/fault_matrix.py --faults 4 --steps 8 --seed 7 --json

The whole run is real (vLLM on CPU, router, verifiers, torchrun), the tiny recipe as opd, so that there is a teacher. Engine,
router, environment server and teacher each get SIGKILL and SIGSTOP in a random order, each a step and a random moment
after the one before was mended. `noticed` is from the signal to the supervisor's first word about it, `ready` to the successor's
readiness, `rollout` to the next finished rollout after that. Fewer faults fit where the run makes several steps between
two. Exits with 1 when the run does not end, something else was restarted, or something is lost or counted twice.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import ROOT, describe_machine, show

sys.path.insert(0, str(ROOT))
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.observe.snapshot import take_snapshot
from tests.e2e.accounts import contradictions
from tests.e2e.faults import DEPTHS, SIGNALS, strike
from tests.e2e.runs import TINY, command, events, last_step

HEALTH_S = 20
SETTINGS = (
    "warmup=null",
    "environments.eval=[]",
    "rollouts.batch_size=192",  # a step takes longer than the pause before a fault, so that as many faults fit
    "checkpoint.interval=5",
    "algorithm={type: opd}",
    f"timeouts.health_s={HEALTH_S}",
    "timeouts.weight_update_s=60",
)


def make_schedule(count: int, seed: int) -> list[tuple[str, str]]:
    """Every process with every kind of fault as often as any other, to within one, in a random order."""
    every = list(itertools.product(DEPTHS, SIGNALS))
    chance = random.Random(seed)
    schedule: list[tuple[str, str]] = []
    while len(schedule) < count:
        schedule += chance.sample(every, min(len(every), count - len(schedule)))
    return schedule


def wait(run: RunDir, what: str, condition: Callable[[], Any], timeout_s: float = 400.0) -> Any:
    """What ``condition`` gives once it is true. Raises SystemExit when the run ends or the time is up before."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline or take_snapshot(run).state.is_final:
            raise SystemExit(f"{what} did not come; see {run.latest_logs}, {run.events}")
        time.sleep(0.1)
    return found


def one_fault(run: RunDir, process: str, kind: str, pause_s: float) -> dict[str, Any]:
    done = last_step(run)
    wait(run, "a step", lambda: last_step(run) > done)
    time.sleep(pause_s)
    step, fault = last_step(run), strike(run, process, kind)
    noticed = wait(run, f"{process} ({kind}) noticed", lambda: fault.noticed(run))
    mended = wait(run, f"a successor of {process} ({kind})", lambda: fault.mended(run))
    size = run.traces("train").stat().st_size
    wait(run, "a rollout", lambda: run.traces("train").stat().st_size != size or last_step(run) > step + 1)
    row = {
        "fault": f"{kind} {process}",
        "after step": step,
        "noticed s": noticed["time"] - fault.time,
        "ready s": mended["time"] - fault.time,
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
    parser.add_argument("--keep", type=Path, help="folder for the run, kept; default: a temporary one")
    parser.add_argument("--json", dest="as_json", action="store_true")
    options = parser.parse_args()
    if options.faults > options.steps - 2:
        parser.error("each fault needs a step, and the run two more")
    with tempfile.TemporaryDirectory(prefix="bench-faults-") as temporary:
        folder = options.keep or Path(temporary)
        os.environ["PRIMERL_HOME"] = str(folder / "state")
        rows, lost = measure(folder, options.faults, options.steps, options.seed)
    what = f"{len(rows)} faults in a run of {options.steps} steps, seed {options.seed}, health_s {HEALTH_S}"
    if options.as_json:
        print(json.dumps({"what": what, **describe_machine(), "rows": rows, "lost": lost}, indent=1))
    else:
        show(what, rows, as_json=False)
        print("\nlost or counted twice: " + ("; ".join(lost) or "nothing"))
    return 1 if lost else 0


def measure(folder: Path, faults: int, steps: int, seed: int) -> tuple[list[dict[str, Any]], list[str]]:
    """A row per fault, and what is wrong after the end."""
    tiny, run = folder / "tiny", RunDir(folder / "run")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [sys.executable, str(ROOT / "tools" / "tiny-model"), str(tiny)], check=True, stdout=sys.stderr
    )
    teacher = f"teacher={{model: {{name: {tiny}/model, dtype: float32}}, inference: {{kv_cache_gib: 0.125}}}}"
    settings = (f"model.name={tiny}/model", f"max_steps={steps}", teacher, *SETTINGS)
    words = [word for text in settings for word in ("--set", text)]
    command("submit", str(TINY), "-p", "local", "--run-dir", str(run.root), *words, cwd=folder)
    chance = random.Random(seed)
    try:
        rows = []
        for process, kind in make_schedule(faults, seed):
            if last_step(run) >= steps - 2:
                break  # the run was faster than its faults
            rows.append(one_fault(run, process, kind, chance.uniform(0, 2)))
        deadline = time.monotonic() + 900
        while not take_snapshot(run).state.is_final and time.monotonic() < deadline:
            time.sleep(0.5)
        state = take_snapshot(run).state
    finally:
        if read_json_or_none(run.state) is not None and not take_snapshot(run).state.is_final:
            command("cancel", str(run.root), "--now", "--wait", cwd=folder)
    lost = [] if state.value == "done" else [f"the run is {state.value}"]
    restarts = len(events(run, "role_restarting"))
    if restarts != len(rows):
        lost.append(f"{restarts} restarts after {len(rows)} faults")
    return rows, lost + contradictions(run)


if __name__ == "__main__":
    sys.exit(main())
