"""Elastic engines: separate jobs that join a running run, leave it, rejoin, and end with it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json, write_json
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.plan.plan import OnExit
from primerl_hpc.run.endpoints import read_endpoint
from primerl_hpc.slurm.commands import ask
from tests.support.helpers import unusable_model, wait_for
from tests.support.virtual_slurm import SERVE, TOY_RECIPE, TRAIN, Cluster, SlurmToy, run_cli


def add_roles(toy: SlurmToy, engines: int = 2) -> SlurmToy:
    toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE)
    for _ in range(engines):
        toy.add_elastic(SERVE)
    return toy


def lives(toy: SlurmToy, engine: str) -> list[int]:
    """Incarnations of engines that joined the run."""
    nodes = [row for row in toy.events("engine_joined") if row["process"] == engine]
    return [row["incarnation"] for row in nodes]


def wait_for_life(toy: SlurmToy, engine: str, incarnation: int) -> None:
    wait_for(lambda: incarnation in lives(toy, engine), f"life {incarnation} of {engine}", tell=toy.words)


def wait_until_left(toy: SlurmToy, engine: str, times: int = 1) -> None:
    def count() -> int:
        return sum(row["process"] == engine for row in toy.events("engine_left"))

    wait_for(lambda: count() >= times, f"{engine} to leave", tell=toy.words)


def assert_nothing_is_left(toy: SlurmToy) -> None:
    toy.assert_nothing_is_left()
    wait_for(lambda: ask(["squeue", "--noheader"]) == "", "an empty queue", tell=lambda: ask(["squeue"]))


@pytest.fixture
def short_grace(cluster: Cluster) -> Iterator[None]:
    """SLURM signals a batch process only at the end of the grace time, and engines have no other process."""
    change = ["scontrol", "update", "PartitionName=preemptible"]
    subprocess.run([*change, "GraceTime=2"], check=True)
    yield
    subprocess.run([*change, "GraceTime=60"], check=True)


@pytest.mark.usefixtures("short_grace")
def test_elastic_engines_leave_rejoin_and_end_with_their_run(toy: SlurmToy) -> None:
    """Their jobs are in a separate partition, in which a job of another partition preempts one of them."""
    layout = {"inference": {"elastic": True, "replicas": 2, "partition": "preemptible"}}
    toy.recipe = TOY_RECIPE | {"layout": layout}
    add_roles(toy).submit()
    for engine in ("inference-0", "inference-1"):
        wait_for_life(toy, engine, 0)
    toy.wait_until_ready("trainer-0")
    hosts = {toy.endpoint(name)["host"] for name in ("inference-0", "inference-1", "trainer-0")}
    assert len(hosts) == 3

    subprocess.run(["scancel", f"{toy.engines}_0"], check=True)  # for good
    wait_until_left(toy, "inference-0")
    assert not toy.run.endpoint("inference-0").exists()

    host = toy.endpoint("inference-1")["host"]
    urgent = ["sbatch", "--parsable", "--partition=main", f"--nodelist={host}", "--exclusive"]
    taker = ask([*urgent, "--output=/dev/null", "--wrap=sleep 600"]).strip()
    wait_until_left(toy, "inference-1")
    wait_for_life(toy, "inference-1", 1000)  # on the node that is free
    assert toy.endpoint("inference-1")["host"] != host
    subprocess.run(["scancel", taker], check=True)

    endpoint = toy.endpoint("inference-1")
    toy.cluster.on(endpoint["host"], "kill", "-9", str(endpoint["pid"]))
    wait_for_life(toy, "inference-1", 1001)
    request = toy.run.restart_request("inference-1")
    toy.as_user(lambda: write_json(request, {"reason": "it cannot be updated"}))
    wait_for_life(toy, "inference-1", 1002)
    assert toy.snapshot().state == RunState.RUNNING
    assert toy.snapshot().processes["inference-0"]["state"] == "left"

    (toy.run.root / "enough").touch()
    toy.wait_for_state(RunState.DONE)
    assert_nothing_is_left(toy)


@pytest.mark.slow
def test_elastic_engines_wait_for_the_next_attempt_of_their_run(toy: SlurmToy) -> None:
    """A requeued run finds the jobs of its engines, which restart with its new keys; a stopped run releases them, and
    resume submits new ones."""
    add_roles(toy, engines=1).submit()
    wait_for_life(toy, "inference-0", 0)
    first = toy.engines
    subprocess.run(["scancel", "--batch", "--signal=USR2", toy.job], check=True)
    toy.wait_until_ready("trainer-0", attempt=2)
    wait_for(
        lambda: (read_endpoint(toy.run, "inference-0") or {}).get("attempt") == 2,
        "the engine in attempt 2",
        tell=toy.words,
    )
    assert toy.engines == first
    assert run_cli("cancel", str(toy.run.root), "--wait").returncode == 0
    assert_nothing_is_left(toy)
    toy.submit()
    assert toy.engines != first
    wait_for(lambda: toy.run.endpoint("inference-0").exists(), "a new engine", tell=toy.words)
    (toy.run.root / "enough").touch()
    toy.wait_for_state(RunState.DONE)
    assert_nothing_is_left(toy)


@pytest.mark.slow
def test_elastic_engines_end_when_the_supervisor_or_their_node_is_lost(toy: SlurmToy) -> None:
    add_roles(toy).submit()
    for engine in ("inference-0", "inference-1"):
        wait_for_life(toy, engine, 0)
    lost = toy.endpoint("inference-0")["host"]
    toy.cluster.tool("kill-node", lost)
    try:
        wait_until_left(toy, "inference-0")  # its endpoint is no longer refreshed
        assert toy.run.endpoint("inference-1").exists()
        owner = read_json(toy.run.supervisor_lock)
        toy.cluster.on(owner["host"], "kill", "-9", str(owner["pid"]))
        toy.wait_for_state(RunState.FAILED)
        wait_for(lambda: not toy.run.endpoint("inference-1").exists(), "the end of the other", tell=toy.words)
    finally:
        toy.cluster.tool("return-node", lost)
    subprocess.run(["scancel", toy.engines], check=True)  # SLURM put the lost one back into the queue
    toy.cluster.wait_until_idle()
    wait_for(lambda: not toy.cluster.processes_of(toy.run), "the end of every process")


def test_a_queued_run_is_cancelled_with_its_elastic_engines(new_toy: Callable[..., SlurmToy]) -> None:
    toy = add_roles(new_toy(begin="now+1hour"), engines=2)
    toy.submit()
    wait_for(lambda: toy.snapshot().state == RunState.PENDING, "the queue")
    assert toy.engines in ask(["squeue", "--noheader", "--format=%F"])
    assert run_cli("cancel", str(toy.run.root)).returncode == 0
    toy.wait_for_job("CANCELLED")
    assert_nothing_is_left(toy)


@pytest.mark.slow
def test_a_run_whose_elastic_engines_are_refused_is_not_queued(toy: SlurmToy, tmp_path: Path) -> None:
    root, model = str(toy.run.root), unusable_model(tmp_path / "model")
    layout = "layout.inference={elastic: true, replicas: 2, partition: nowhere}"
    words = ("submit", "reverse_text/tiny", "--profile", "virtual", "--run-dir", root)
    done = run_cli(*words, "--set", layout, "--set", f"model.name={model}", "--set", "warmup=null")
    assert done.returncode == ExitCode.UNAVAILABLE and "partition" in done.stderr, done.stderr
    assert not toy.run.root.exists()
    assert_nothing_is_left(toy)
