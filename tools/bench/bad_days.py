#!/usr/bin/env python3
"""The real tiny run on a virtual cluster, through one bad day after the other: is a step lost, is anything left running?

    tools/bench/bad_days.py                                    # every day, about three minutes each
    tools/bench/bad_days.py --only none                        # the headline command with the shipped profile, unchanged
    tools/bench/bad_days.py --only walltime,preemption --json

Needs root (see tools/virtual-cluster). Whole runs: vLLM on CPU, router, verifiers, torchrun, SLURM. `none` is what the README
says, 400 steps of warm-up and 40 of RL, and its reward must rise; the others are short, with a checkpoint every two steps.
`lost` counts steps that the trainer had to make again: none where it was warned, those since the last checkpoint where it was not.
`released s` is from the end of trainer and orchestrator until SLURM's queue is empty. Exits with 1 when a run does not end as it should,
a step or a rollout is lost or counted twice (`tests/e2e/accounts.py`), or processes or jobs are left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import ROOT, describe_machine, show

sys.path.insert(0, str(ROOT))
from primerl_hpc.common.files import read_json, read_json_or_none
from primerl_hpc.common.metrics import read_steps
from primerl_hpc.common.names import RunState
from primerl_hpc.common.slurm import ask
from primerl_hpc.common.yamldoc import dump_yaml
from primerl_hpc.plan.types import load_plan
from tests.e2e.accounts import contradictions
from tests.e2e.runs import events, last_step
from tests.slurm.real import READY_S, SMALL, RealRun
from tests.slurm.virtual import NODES, Cluster, wait_for
from tests.support import make_tiny_model

INTERVAL = 2
RELEASED_S = 10.0
RECIPE = {**SMALL, "max_steps": 16, "checkpoint": {"interval": INTERVAL}}


@dataclass(frozen=True)
class Day:
    happens: Callable[[Cluster, RealRun], None]
    options: tuple[str, ...] = ()
    attempts: int = 1
    may_lose: int = 0
    """Steps made again for each fault that nobody announced: at most those since the last checkpoint."""


# -- what happens --------------------------------------------------------------------------------------------------------


def wait_for_step(real: RealRun, step: int) -> None:
    def is_made() -> bool:
        assert not real.state.is_final, f"the run is {real.state}"
        return last_step(real.run) >= step

    wait_for(is_made, f"step {step}", READY_S, real.words)


def wait_for_attempt(real: RealRun, attempt: int) -> None:
    def is_begun() -> bool:
        assert not real.state.is_final, f"the run is {real.state}"
        return len(events(real.run, "attempt_started")) >= attempt

    wait_for(is_begun, f"attempt {attempt}", READY_S, real.words)


def kill(process: str, depth: int) -> Callable[[Cluster, RealRun], None]:
    def happens(cluster: Cluster, real: RealRun) -> None:
        wait_for_step(real, 3)
        real.process_of(cluster, process, depth).kill()

    return happens


def headline(_cluster: Cluster, real: RealRun) -> None:
    real.wait_for_state(RunState.DONE, 1800)
    rewards = [row["eval/held-out/reward/mean"] for row in read_steps(real.run.metrics("eval")).values()]
    print(f"held-out reward {' → '.join(f'{each:.3f}' for each in rewards)}", file=sys.stderr)
    assert rewards[-1] > rewards[0] + 0.2, f"the reward does not rise: {rewards}"


def walltime(_cluster: Cluster, real: RealRun) -> None:
    """Twice, by the very signal of `--signal=B:USR2@…`: a real limit would have to know how fast this machine is."""
    for life in (1, 2):
        wait_for_attempt(real, life)
        wait_for_step(real, (real.run.latest_checkpoint() or 0) + 3)
        subprocess.run(["scancel", "--batch", "--signal=USR2", real.job], check=True)
        wait_for(lambda: real.state == RunState.PENDING, "the queue", tell=real.words)


def preemption(_cluster: Cluster, real: RealRun) -> None:
    wait_for_step(real, 3)
    words = f"sbatch --parsable --partition=main --nodes={NODES} --exclusive --output=/dev/null --wrap"
    urgent = ask([*words.split(), "sleep 900"]).strip()
    wait_for(lambda: real.state == RunState.PENDING, "its preemption", tell=real.words)
    subprocess.run(["scancel", urgent], check=True)


def lose_the_trainers_node(cluster: Cluster, real: RealRun) -> None:
    wait_for_step(real, 3)
    (node,) = load_plan(real.run).phase("main").process("trainer-0").nodes
    host = read_json(real.run.state)["hosts"][node]
    cluster.tool("kill-node", host)
    try:  # it comes back when the run has gone on elsewhere
        wait_for_step(real, 8)
    finally:
        cluster.tool("return-node", host)


def restart_the_controller(cluster: Cluster, real: RealRun) -> None:
    cluster.wait_until_saved(real.job)
    wait_for_step(real, 3)
    cluster.tool("kill-controller")
    wait_for(lambda: last_step(real.run) >= 6, "steps without a controller", READY_S)
    cluster.tool("return-controller")


ON_SPARE = ("--profile-set", "scheduler.spare_nodes=1")
PREEMPTIBLE = ("--partition", "preemptible")
DAYS = {
    "none": Day(headline),
    "trainer": Day(kill("trainer-0", 2), may_lose=INTERVAL),
    "engine": Day(kill("inference-0", 1)),
    "orchestrator": Day(kill("orchestrator-0", 1), may_lose=INTERVAL),
    "walltime": Day(walltime, attempts=3),
    "preemption": Day(preemption, PREEMPTIBLE, attempts=2),
    "node-spare": Day(lose_the_trainers_node, ON_SPARE, may_lose=INTERVAL),
    "node": Day(lose_the_trainers_node, attempts=2, may_lose=INTERVAL),
    "controller": Day(restart_the_controller),
}

# -- one day -------------------------------------------------------------------------------------------------------------

PRIMERL = (sys.executable, "-m", "primerl_hpc")


def submit(name: str, day: Day, folder: Path) -> RealRun:
    """In ``folder``, where a model is in outputs/tiny and the checkout's recipes are in recipes."""
    root = folder / "runs" / name
    if day.happens is headline:  # to the letter, but for the folder of the run
        words = ("recipes/reverse_text/tiny.yaml", "--profile", "virtual", "--follow")
    else:
        (folder / f"{name}.yaml").write_text(dump_yaml({**RECIPE, "name": name}))
        words = (f"{name}.yaml", "--profile", "virtual", *day.options)
    subprocess.run(
        [*PRIMERL, "submit", *words, "--run-dir", str(root)], cwd=folder, check=True, stdout=sys.stderr
    )
    return RealRun(root, "")


def spend(name: str, day: Day, cluster: Cluster, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """A row, and what is wrong."""
    cluster.wait_until_idle()
    start, wrong = time.time(), []
    real = submit(name, day, folder)
    try:
        day.happens(cluster, real)
        wait_for(lambda: real.state.is_final, "its end", READY_S, real.words)
    except (AssertionError, IndexError) as error:
        wrong.append(str(error))
    released_s = until_released(real) if not wrong else float("nan")
    left = len(cluster.processes_of(real.run)) + len(ask(["squeue", "--noheader"]).splitlines())
    attempts = len(events(real.run, "attempt_started"))
    lost = len(real.repeated_steps())
    if not wrong:
        wrong += contradictions(real.run)
    if (real.state, attempts) != (RunState.DONE, day.attempts):
        wrong.append(f"{real.state} after {attempts} attempts, not done after {day.attempts}")
    if lost > day.may_lose:
        wrong.append(f"{lost} steps had to be made again")
    if left:
        wrong.append(f"{left} processes and jobs are left")
    if released_s > RELEASED_S:
        wrong.append(f"the nodes were released after {released_s:.0f} s")
    row = {
        "bad day": name,
        "state": real.state.value,
        "attempts": attempts,
        "steps": last_step(real.run),
        "lost": lost,
        "may lose": day.may_lose,
        "released s": released_s,
        "left": left,
        "wall s": time.time() - start,
        "fits": not wrong,
    }
    print(json.dumps(row), *wrong, sep="\n", file=sys.stderr, flush=True)
    clear(real, cluster)
    return row, [f"{name}: {sentence}" for sentence in wrong]


def until_released(real: RealRun) -> float:
    """Seconds from the end of trainer and orchestrator until no job is in the queue, not even one that completes."""
    wait_for(lambda: not ask(["squeue", "--noheader"]).strip(), "an empty queue")
    return time.time() - max(row["time"] for row in events(real.run, "role_exited"))


def clear(real: RealRun, cluster: Cluster) -> None:
    """For the next day, however this one ended."""
    if read_json_or_none(real.run.job) is not None:
        subprocess.run(["scancel", "--full", real.job], check=False, capture_output=True)
    subprocess.run(["scancel", "--user=root"], check=False, capture_output=True)  # of this cluster
    wait_for(lambda: not cluster.processes_of(real.run), "the end of every process")


@contextlib.contextmanager
def a_cluster(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder)
    size = ("--nodes", str(NODES), "--gpus", "8", "--node-timeout", "6", "--requeue-delay", "8")
    print(cluster.tool("up", *size), file=sys.stderr)
    os.environ["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"
    try:
        yield cluster
    finally:
        cluster.tool("down", "--purge")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(DAYS), help=f"some of {','.join(DAYS)}")
    parser.add_argument("--keep", type=Path, help="folder for the runs, kept; default: a temporary one")
    parser.add_argument("--json", dest="as_json", action="store_true")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := set(names) - set(DAYS):
        parser.error(f"no such day: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="bad-days-") as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        os.environ |= {"PRIMERL_HOME": str(folder / "state"), "PYTHONPATH": str(ROOT)}
        os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        make_tiny_model(folder / "outputs" / "tiny")
        (folder / "recipes").symlink_to(ROOT / "recipes")
        with a_cluster(Path(temporary) / "cluster") as cluster:
            spent = [spend(name, DAYS[name], cluster, folder) for name in names]
    rows, wrong = [row for row, _ in spent], [each for _, all_ in spent for each in all_]
    what = f"the tiny recipe on a virtual cluster, a checkpoint every {INTERVAL} steps"
    if options.as_json:
        print(json.dumps({"what": what, **describe_machine(), "rows": rows, "wrong": wrong}, indent=1))
    else:
        show(what, rows, as_json=False)
        print("\nlost, left or counted twice: " + ("; ".join(wrong) or "nothing"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
