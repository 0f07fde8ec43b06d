#!/usr/bin/env python3
"""The real tiny run on a virtual cluster, through one bad day after the other: is a step lost, is anything left running?

    tools/bench/bad_days.py                                    # every day, one to three minutes each
    tools/bench/bad_days.py --only none                        # the headline command with the shipped profile, unchanged
    tools/bench/bad_days.py --only walltime,preemption --json

Needs root (see tools/virtual-cluster). Whole runs: vLLM on CPU, router, verifiers, torchrun, SLURM. `none` is what the README
says, 400 steps of warm-up and 40 of RL, and its reward must rise; the others are short, with a checkpoint every two steps.
A run that a day fails or stops leaves nothing, gives its nodes back within 30 s, and is resumed, at last to its end.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import ROOT, conclude

sys.path.insert(0, str(ROOT))
from primerl_hpc.common.files import read_json, read_json_or_none
from primerl_hpc.common.metrics import read_steps
from primerl_hpc.common.names import RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.slurm import ask, parse_squeue, squeue_command
from primerl_hpc.common.yamldoc import dump_yaml
from primerl_hpc.plan.types import load_plan
from tests.e2e.accounts import contradictions
from tests.e2e.faults import DEPTHS
from tests.e2e.runs import events, last_step, wait_in_run
from tests.slurm.real import READY_S, SMALL, RealRun
from tests.slurm.virtual import NODES, Cluster, not_on, wait_for
from tests.support import make_tiny_model

INTERVAL = 2
RELEASED_S, FAILED_RELEASED_S = 10.0, 30.0
DISK_MIB = 64
RECIPE = {**SMALL, "max_steps": 16, "checkpoint": {"interval": INTERVAL}}
PRIMERL = (sys.executable, "-m", "primerl_hpc")


@dataclass(frozen=True)
class Day:
    happens: Callable[[Cluster, RealRun], None]
    options: tuple[str, ...] = ()
    recipe: dict[str, Any] = field(default_factory=dict)
    attempts: int = 1
    may_lose: int = 0
    """Steps made again for each fault that nobody announced: at most those since the last checkpoint."""
    on_small_disk: bool = False


# -- waiting and looking -------------------------------------------------------------------------------------------------


def wait_for_step(real: RealRun, step: int) -> None:
    wait_in_run(real.run, lambda: last_step(real.run) >= step, f"step {step}", jobs=real.facts)


def wait_for_event(real: RealRun, name: str, count: int = 1) -> None:
    wait_in_run(real.run, lambda: len(events(real.run, name)) >= count, f"{name} ({count})", jobs=real.facts)


def host_of(real: RealRun, process: str) -> str:
    node = load_plan(real.run).phase("main").process(process).nodes[0]
    return read_json(real.run.state)["hosts"][node]


def resume_after(cluster: Cluster, real: RealRun, state: RunState) -> None:
    """Once the run is over with ``state``, has left nothing and has given its nodes back in time."""
    start = time.monotonic()
    wait_for(lambda: real.state.is_final, f"state {state}", tell=real.words)
    assert real.state == state, f"the run is {real.state}"
    wait_for(lambda: not ask(["squeue", "--noheader"]).strip(), "an empty queue")
    wait_for(lambda: not cluster.processes_of(real.run), "the end of every process")
    assert time.monotonic() - start <= FAILED_RELEASED_S, (
        f"{time.monotonic() - start:.0f} s until it was gone"
    )
    subprocess.run([*PRIMERL, "resume", str(real.run.root)], check=True, stdout=sys.stderr)


# -- what happens --------------------------------------------------------------------------------------------------------


def headline(_cluster: Cluster, real: RealRun) -> None:
    real.wait_for_state(RunState.DONE, 1800)
    rewards = [row["eval/held-out/reward/mean"] for row in read_steps(real.run.metrics("eval")).values()]
    print(f"held-out reward {' → '.join(f'{each:.3f}' for each in rewards)}", file=sys.stderr)
    assert rewards[-1] > rewards[0] + 0.2, f"the reward does not rise: {rewards}"


def beside_the_trainer(_cluster: Cluster, real: RealRun) -> None:
    """Nothing bad: orchestrator, router and environment servers are on the trainer's node."""
    wait_for_step(real, 1)
    hosts = {
        name: host_of(real, name) for name in ("trainer-0", "orchestrator-0", "router-0", "env_server-0")
    }
    assert set(hosts.values()) == {host_of(real, "trainer-0")} != {host_of(real, "inference-0")}, hosts


def kill(process: str, depth: int) -> Callable[[Cluster, RealRun], None]:
    def happens(cluster: Cluster, real: RealRun) -> None:
        wait_for_step(real, 3)
        real.process_of(cluster, process, depth).kill()
        if process in DEPTHS:  # a server: it is started again beside the others, and found by them
            wait_for_event(real, "role_restarting")
            assert [row["process"] for row in events(real.run, "role_restarting")] == [process]

    return happens


def crash(cluster: Cluster, real: RealRun) -> None:
    kill("trainer-0", 2)(cluster, real)
    resume_after(cluster, real, RunState.FAILED)


def kill_the_supervisor(cluster: Cluster, real: RealRun) -> None:
    wait_for_step(real, 3)
    owner = read_json(real.run.supervisor_lock)
    cluster.on(owner["host"], "kill", "-9", str(owner["pid"]))
    resume_after(cluster, real, RunState.FAILED)


def scancel(cluster: Cluster, real: RealRun) -> None:
    """SLURM sends SIGTERM, and SIGKILL after its KillWait, of 5 s here: enough to save."""
    wait_for_step(real, 3)
    subprocess.run(["scancel", real.job], check=True)
    resume_after(cluster, real, RunState.STOPPED)


def walltime(_cluster: Cluster, real: RealRun) -> None:
    """Twice, by the very signal of `--signal=B:USR2@…`: a real limit would have to know how fast this machine is."""
    for life in (1, 2):
        wait_for_event(real, "attempt_started", life)
        wait_for_step(real, (real.run.latest_checkpoint() or 0) + 3)
        subprocess.run(["scancel", "--batch", "--signal=USR2", real.job], check=True)
        wait_for(lambda: real.state == RunState.PENDING, "the queue", tell=real.words)


def preemption(_cluster: Cluster, real: RealRun) -> None:
    wait_for_step(real, 3)
    words = f"sbatch --parsable --partition=main --nodes={NODES} --exclusive --output=/dev/null --wrap"
    urgent = ask([*words.split(), "sleep 900"]).strip()
    wait_for(lambda: real.state == RunState.PENDING, "its preemption", tell=real.words)
    subprocess.run(["scancel", urgent], check=True)


def lose_the_node_of(process: str) -> Callable[[Cluster, RealRun], None]:
    def happens(cluster: Cluster, real: RealRun) -> None:
        wait_for_step(real, 3)
        host = host_of(real, process)
        cluster.tool("kill-node", host)
        try:  # it comes back when the run has gone on elsewhere
            wait_for_step(real, 8)
        finally:
            cluster.tool("return-node", host)

    return happens


def restart_a_slurmd(cluster: Cluster, real: RealRun) -> None:
    """The trainer's: SLURM misses it, its step goes on, and it comes back."""
    wait_for_step(real, 3)
    host = host_of(real, "trainer-0")
    state = ["sinfo", "--noheader", f"--nodes={host}", "--partition=main", "--format=%T"]
    cluster.on(host, "sh", "-c", "kill -9 $(cat /run/slurmd.pid)")
    wait_for(lambda: ask(state).strip().endswith("*"), "the controller to miss it", tell=real.words)
    cluster.on(host, "slurmd")
    wait_for(lambda: not ask(state).strip().endswith("*"), "its return", tell=real.words)


def restart_the_controller(cluster: Cluster, real: RealRun) -> None:
    cluster.wait_until_saved(real.job)
    wait_for_step(real, 3)
    cluster.tool("kill-controller")
    wait_for(lambda: last_step(real.run) >= 6, "steps without a controller", READY_S)
    cluster.tool("return-controller")


def fill_the_disk(cluster: Cluster, real: RealRun) -> None:
    wait_for_step(real, 3)
    rest = real.run.root.parent / "rest"
    with contextlib.suppress(OSError), rest.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    wait_for(lambda: real.state.is_final, "its end", tell=real.words)
    assert "No space left on device" in (read_json(real.run.failure)["message"])
    rest.unlink()
    resume_after(cluster, real, RunState.FAILED)


def fail_a_preflight(_cluster: Cluster, real: RealRun) -> None:
    wait_for_event(real, "run_requeued")
    assert events(real.run, "run_requeued")[0]["without"] == ["n1"]
    wait_for_step(real, 1)
    assert "n1" not in read_json(real.run.state)["hosts"]


def start_a_second_supervisor(_cluster: Cluster, real: RealRun) -> None:
    wait_for_step(real, 3)
    second = ask(["sbatch", "--parsable", str(real.run.launch / "job.sbatch")]).strip()
    wait_for(lambda: parse_squeue(ask(squeue_command([second])))[second].state == "FAILED", "its refusal")
    assert "another supervisor" in (real.run.root / "logs" / f"slurm-{second}.out").read_text()


def meet_a_neighbour(cluster: Cluster, real: RealRun) -> None:
    """A second run of the same recipe on the same nodes at the same time; both end well."""
    wait_for_step(real, 1)
    other = submit("neighbour-2", DAYS["neighbour"], real.run.root.parent.parent)
    wait_for_step(other, 3)
    assert not real.state.is_final, "the first run was over before its neighbour had begun"
    assert read_json(other.run.state)["hosts"] == read_json(real.run.state)["hosts"]
    for run in (real, other):
        run.wait_for_state(RunState.DONE, 2 * READY_S)
    restarts = events(real.run, "role_restarting") + events(other.run, "role_restarting")
    assert not restarts, f"the neighbours disturbed each other: {restarts}"
    assert not (wrong := contradictions(other.run)), wrong
    wait_for(lambda: not cluster.processes_of(other.run), "the end of the neighbour's processes")


def profile(*settings: str) -> tuple[str, ...]:
    return tuple(word for each in settings for word in ("--profile-set", each))


SHARED_NODES = profile(
    "scheduler.exclusive=false",
    "scheduler.memory=4G",
    "scheduler.gres=[gpu:2]",
    "scheduler.nodelist=n1,n2",
    "node.cores=16",
)
DAYS = {
    "none": Day(headline),
    "place-trainer": Day(beside_the_trainer, recipe={"layout": {"orchestrator": {"place": "trainer"}}}),
    "trainer": Day(kill("trainer-0", 2), may_lose=INTERVAL),
    "orchestrator": Day(kill("orchestrator-0", 1), may_lose=INTERVAL),
    **{name: Day(kill(f"{name}-0", DEPTHS[f"{name}-0"])) for name in ("inference", "router", "env_server")},
    "crash": Day(crash, recipe={"recovery": {"in_place": False}}, attempts=2, may_lose=INTERVAL),
    "supervisor": Day(kill_the_supervisor, attempts=2, may_lose=INTERVAL),
    "scancel": Day(scancel, attempts=2),
    "walltime": Day(walltime, attempts=3),
    "preemption": Day(preemption, ("--partition", "preemptible"), attempts=2),
    "trainer-node-spare": Day(
        lose_the_node_of("trainer-0"), profile("scheduler.spare_nodes=1"), may_lose=INTERVAL
    ),
    "trainer-node": Day(lose_the_node_of("trainer-0"), attempts=2, may_lose=INTERVAL),
    "head": Day(lose_the_node_of("orchestrator-0"), attempts=2, may_lose=INTERVAL),
    "inference-node": Day(
        lose_the_node_of("inference-0"),
        recipe={"layout": {"orchestrator": {"place": "trainer"}}},
        attempts=2,
        may_lose=INTERVAL,
    ),
    "slurmd": Day(restart_a_slurmd),
    "controller": Day(restart_the_controller),
    "disk": Day(fill_the_disk, attempts=2, may_lose=INTERVAL, on_small_disk=True),
    "preflight": Day(
        fail_a_preflight, profile(f"preflight.health_checks=[{json.dumps(not_on('n1'))}]"), attempts=2
    ),
    "second-supervisor": Day(start_a_second_supervisor),
    "neighbour": Day(
        meet_a_neighbour, SHARED_NODES, recipe={"max_steps": 100}
    ),  # until the second one trains
}

# -- one day -------------------------------------------------------------------------------------------------------------


def submit(name: str, day: Day, folder: Path) -> RealRun:
    """In ``folder``, where a model is in outputs/tiny and the checkout's recipes are in recipes."""
    root = folder / ("small" if day.on_small_disk else "runs") / name
    if day.happens is headline:  # to the letter, but for the folder of the run
        words = ("recipes/reverse_text/tiny.yaml", "--profile", "virtual", "--follow")
    else:
        (folder / f"{name}.yaml").write_text(dump_yaml({**RECIPE, **day.recipe, "name": name}))
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
    """Seconds from the end of the last trainer or orchestrator, a neighbour's too, until no job is in the queue, not even one
    that completes.
    """
    wait_for(lambda: not ask(["squeue", "--noheader"]).strip(), "an empty queue")
    so_far = [RunDir(root) for root in real.run.root.parent.iterdir()]
    return time.time() - max(row["time"] for run in so_far for row in events(run, "role_exited"))


def clear(real: RealRun, cluster: Cluster) -> None:
    """For the next day, however this one ended."""
    if read_json_or_none(real.run.job) is not None:
        subprocess.run(["scancel", "--full", real.job], check=False, capture_output=True)
    subprocess.run(["scancel", "--user=root"], check=False, capture_output=True)  # of this cluster
    wait_for(lambda: not cluster.processes_of(real.run), "the end of every process")


@contextlib.contextmanager
def a_small_disk(folder: Path) -> Iterator[None]:
    """That every node sees: mounted before the cluster is up."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


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
    parser.add_argument("--only", default=",".join(DAYS), help=f"some of {', '.join(DAYS)}, by commas")
    parser.add_argument("--keep", type=Path, help="folder for the runs, kept; default: a temporary one")
    parser.add_argument("--json", dest="as_json", action="store_true")
    options = parser.parse_args()
    names = [name.strip() for name in options.only.split(",")]
    if unknown := set(names) - set(DAYS):
        parser.error(f"no such day: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="bad-days-") as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        os.environ |= {"PRIMERL_HOME": str(folder / "state"), "PYTHONPATH": str(ROOT)}
        os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        make_tiny_model(folder / "outputs" / "tiny")
        (folder / "recipes").symlink_to(ROOT / "recipes")
        rows: list[dict[str, Any]] = []
        wrong: list[str] = []
        with a_small_disk(folder / "small"), a_cluster(Path(temporary) / "cluster") as cluster:
            for name in names:
                try:
                    row, faults = spend(name, DAYS[name], cluster, folder)
                except subprocess.CalledProcessError as error:  # the other days are worth a table
                    faults = [f"{name}: primerl-hpc submit ended with {error.returncode}"]
                else:
                    rows.append(row)
                wrong += faults
    what = f"the tiny recipe on a virtual cluster, a checkpoint every {INTERVAL} steps"
    return conclude(what, rows, wrong, as_json=options.as_json)


if __name__ == "__main__":
    sys.exit(main())
