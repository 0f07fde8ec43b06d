#!/usr/bin/env python3
"""Run the real tiny recipe on a virtual cluster under one failure scenario ("day") after the other.

    tools/bench/bad_days.py                                    # all scenarios, one to three minutes each
    tools/bench/bad_days.py --only none                        # the README's command with the shipped profile
    tools/bench/bad_days.py --only walltime,preemption --json

Requires root (see tools/virtual-cluster). Runs are complete: vLLM on CPU, router, verifiers, torchrun, SLURM. `none` is
the README's example, 400 warm-up steps and 40 RL steps, and its reward must rise; the other scenarios are short, with a
checkpoint every two steps. A run that fails or stops must leave no processes, release its nodes within 30 s, and finish
after a resume. `lost` counts repeated training steps: none after a warning, at most those since the last checkpoint
otherwise. `released s` is the time from the end of trainer and orchestrator until SLURM's queue is empty. Exits with 1
if a run ends in another state than expected, a step or rollout is lost or counted twice (`tests/support/accounts.py`),
or processes or jobs remain.
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
from primerl_hpc.common.document import dump_yaml
from primerl_hpc.common.files import read_json, read_json_or_none
from primerl_hpc.common.names import RunState
from primerl_hpc.plan.types import load_plan
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.commands import ask
from primerl_hpc.slurm.jobs import parse_squeue, squeue_command
from tests.support.accounts import contradictions
from tests.support.faults import DEPTHS
from tests.support.helpers import make_tiny_model
from tests.support.real_slurm import SMALL, RealRun
from tests.support.runs import events, last_step, wait_in_run
from tests.support.virtual_slurm import NODES, Cluster, not_on, wait_for

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
    """Maximum number of repeated steps after a failure without warning: those since the last checkpoint."""
    on_small_disk: bool = False


# -- waiting and checking --------------------------------------------------------------------------


def wait_for_step(real: RealRun, step: int) -> None:
    wait_in_run(real.run, lambda: last_step(real.run) >= step, f"step {step}", jobs=real.facts)


def wait_for_event(real: RealRun, name: str, count: int = 1) -> None:
    wait_in_run(real.run, lambda: len(events(real.run, name)) >= count, f"{name} ({count})", jobs=real.facts)


def host_of(real: RealRun, process: str) -> str:
    node = load_plan(real.run).phase("main").process(process).nodes[0]
    return read_json(real.run.state)["hosts"][node]


def resume_after(cluster: Cluster, real: RealRun, state: RunState) -> None:
    """Wait until the run has ended with ``state``, left no processes and released its nodes in time."""
    start = time.monotonic()
    wait_for(lambda: real.state.is_final, f"state {state}", tell=real.words)
    assert real.state == state, f"the run is {real.state}"
    wait_for(lambda: not ask(["squeue", "--noheader"]).strip(), "an empty queue")
    wait_for(lambda: not cluster.processes_of(real.run), "the end of every process")
    assert time.monotonic() - start <= FAILED_RELEASED_S, f"{time.monotonic() - start:.0f} s until its end"
    subprocess.run([*PRIMERL, "resume", str(real.run.root)], check=True, stdout=sys.stderr)


# -- scenarios -------------------------------------------------------------------------------------


def headline(_cluster: Cluster, real: RealRun) -> None:
    real.wait_for_state(RunState.DONE, 1800)
    rewards = [row["eval/held-out/reward/mean"] for row in read_steps(real.run.metrics("eval")).values()]
    print(f"held-out reward {' → '.join(f'{each:.3f}' for each in rewards)}", file=sys.stderr)
    assert rewards[-1] > rewards[0] + 0.2, f"the reward does not rise: {rewards}"


def beside_the_trainer(_cluster: Cluster, real: RealRun) -> None:
    """Inject no failure. Orchestrator, router and environment servers are on the trainer's node."""
    wait_for_step(real, 1)
    hosts = {
        name: host_of(real, name) for name in ("trainer-0", "orchestrator-0", "router-0", "env_server-0")
    }
    assert set(hosts.values()) == {host_of(real, "trainer-0")} != {host_of(real, "inference-0")}, hosts


def kill(process: str, depth: int) -> Callable[[Cluster, RealRun], None]:
    def happens(cluster: Cluster, real: RealRun) -> None:
        wait_for_step(real, 3)
        real.process_of(cluster, process, depth).kill()
        if process in DEPTHS:  # a server: it is restarted alone, and the other processes find it again
            wait_for_event(real, "role_restarting")
            assert [row["process"] for row in events(real.run, "role_restarting")] == [process]

    return happens


def crash(cluster: Cluster, real: RealRun) -> None:
    kill("trainer-0", 2)(cluster, real)
    resume_after(cluster, real, RunState.FAILED)


def crash_beside_a_hung_engine(cluster: Cluster, real: RealRun) -> None:
    """A stopped process, like one that hangs in the kernel, does not react to SIGTERM."""
    wait_for_step(real, 3)
    real.process_of(cluster, "inference-0", DEPTHS["inference-0"]).suspend()
    crash(cluster, real)


def kill_the_supervisor(cluster: Cluster, real: RealRun) -> None:
    wait_for_step(real, 3)
    owner = read_json(real.run.supervisor_lock)
    cluster.on(owner["host"], "kill", "-9", str(owner["pid"]))
    resume_after(cluster, real, RunState.FAILED)


def scancel(cluster: Cluster, real: RealRun) -> None:
    """SLURM sends SIGTERM, and SIGKILL after KillWait (30 s), which is enough to save a checkpoint."""
    wait_for_step(real, 3)
    subprocess.run(["scancel", real.job], check=True)
    resume_after(cluster, real, RunState.STOPPED)


def walltime(_cluster: Cluster, real: RealRun) -> None:
    """Send the signal of `--signal=B:USR2@…` twice; a real walltime would depend on the speed of this machine."""
    for attempt in (1, 2):
        wait_for_event(real, "attempt_started", attempt)
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
        try:  # the node returns after the run has continued on another one
            wait_for_step(real, 8)
        finally:
            cluster.tool("return-node", host)

    return happens


def restart_a_slurmd(cluster: Cluster, real: RealRun) -> None:
    """Disconnect the trainer's node: SLURM reports it missing, its step continues, and the node returns."""
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
    wait_for(lambda: last_step(real.run) >= 6, "steps without a controller")
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
    """Run the same recipe twice on the same nodes at the same time; both must finish."""
    wait_for_step(real, 1)
    other = submit("neighbour-2", DAYS["neighbour"], real.run.root.parent.parent)
    wait_for_step(other, 3)
    assert not real.state.is_final, "the first run ended before the second one started"
    assert read_json(other.run.state)["hosts"] == read_json(real.run.state)["hosts"]
    for run in (real, other):
        run.wait_for_state(RunState.DONE)
    restarts = events(real.run, "role_restarting") + events(other.run, "role_restarting")
    assert not restarts, f"the concurrent runs disturbed each other: {restarts}"
    assert not (wrong := contradictions(other.run)), wrong
    wait_for(lambda: not cluster.processes_of(other.run), "the end of the second run's processes")


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
    "crash-hung": Day(
        crash_beside_a_hung_engine, recipe={"recovery": {"in_place": False}}, attempts=2, may_lose=INTERVAL
    ),
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

# -- one scenario ----------------------------------------------------------------------------------


def submit(name: str, day: Day, folder: Path) -> RealRun:
    """Submit in ``folder``, which contains a model in outputs/tiny and the recipes of the checkout in recipes."""
    root = folder / ("small" if day.on_small_disk else "runs") / name
    if day.happens is headline:  # the exact command, except for the run directory
        words = ("recipes/reverse_text/tiny.yaml", "--profile", "virtual", "--follow")
    else:
        (folder / f"{name}.yaml").write_text(dump_yaml({**RECIPE, **day.recipe, "name": name}))
        words = (f"{name}.yaml", "--profile", "virtual", *day.options)
    subprocess.run(
        [*PRIMERL, "submit", *words, "--run-dir", str(root)], cwd=folder, check=True, stdout=sys.stderr
    )
    return RealRun(root, "")


def spend(name: str, day: Day, cluster: Cluster, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the row of the table, and the errors found."""
    cluster.wait_until_idle()
    start, wrong = time.time(), []
    real = submit(name, day, folder)
    try:
        day.happens(cluster, real)
        wait_for(lambda: real.state.is_final, "its end", real.words)
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
    """Seconds from the end of the last trainer or orchestrator, of both runs, until no job is in the queue, not
    even one that completes.
    """
    wait_for(lambda: not ask(["squeue", "--noheader"]).strip(), "an empty queue")
    so_far = [RunDir(root) for root in real.run.root.parent.iterdir()]
    return time.time() - max(row["time"] for run in so_far for row in events(run, "role_exited"))


def clear(real: RealRun, cluster: Cluster) -> None:
    """Clean up for the next scenario, however this one ended."""
    if read_json_or_none(real.run.job) is not None:
        subprocess.run(["scancel", "--full", real.job], check=False, capture_output=True)
    # jobs of this virtual cluster
    subprocess.run(["scancel", "--user=root"], check=False, capture_output=True)
    wait_for(lambda: not cluster.processes_of(real.run), "the end of every process")


@contextlib.contextmanager
def a_small_disk(folder: Path) -> Iterator[None]:
    """Create a folder visible on every node; it is mounted before the cluster starts."""
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
    parser.add_argument("--only", default=",".join(DAYS), help=f"comma-separated subset of {', '.join(DAYS)}")
    parser.add_argument(
        "--keep", type=Path, help="keep the runs in this folder [default: a temporary folder]"
    )
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
                except subprocess.CalledProcessError as error:  # continue with the other scenarios
                    faults = [f"{name}: primerl-hpc submit ended with {error.returncode}"]
                else:
                    rows.append(row)
                wrong += faults
    what = f"the tiny recipe on a virtual cluster, a checkpoint every {INTERVAL} steps"
    return conclude(what, rows, wrong, as_json=options.as_json)


if __name__ == "__main__":
    sys.exit(main())
