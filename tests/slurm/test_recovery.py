"""Faults inside the allocation: bad and lost nodes, and their replacement by spares."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json, write_json
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.plan.plan import OnExit
from primerl_hpc.slurm.commands import ask
from tests.support.cluster_user import ClusterUser
from tests.support.virtual_slurm import (
    SAY,
    SAY_BESIDE_ENGINE,
    SERVE,
    TOY_RECIPE,
    TRAIN,
    USERS,
    WITH_USERS,
    Acting,
    Cluster,
    SlurmToy,
    call_down,
    not_on,
    preflight,
    resume_nodes,
    run_cli,
    wait_for,
)


def add_roles(toy: SlurmToy, train: str = TRAIN) -> SlurmToy:
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART, nodes=(0,))
    toy.add(Role.TRAINER, train, OnExit.ENDS_PHASE, nodes=(1,))
    return toy


@pytest.mark.slow
def test_a_node_without_the_run_directory_is_excluded_and_replaced_by_a_spare(
    new_toy: Callable[..., SlurmToy],
) -> None:
    toy = add_roles(new_toy(spare_nodes=1), SAY_BESIDE_ENGINE)
    toy.plan_changes = {"spare_nodes": 1, "preflight": preflight()}
    toy.prepare()
    toy.cluster.on("n2", "mount", "-t", "tmpfs", "none", str(toy.run.root))
    try:
        toy.submit()
        toy.wait_for_state(RunState.DONE)
    finally:
        toy.cluster.on("n2", "umount", "-l", str(toy.run.root))
    toy.assert_nothing_is_left()
    toy.wait_for_words("on n1", "inference-0")
    toy.wait_for_words("on n3", "trainer-0")
    excluded = toy.events("node_excluded")
    assert [(row["node"], row["spare"]) for row in excluded] == [("n2", "n3")]
    assert "run directory" in excluded[0]["why"]
    assert read_json(toy.run.state)["hosts"] == ["n1", "n3"]
    wait_for(lambda: "preflight" in toy.steps(), "its step in accounting")


def test_with_too_few_good_nodes_the_run_is_requeued_without_the_bad_one(
    new_toy: Callable[..., SlurmToy],
) -> None:
    toy = add_roles(new_toy(), SAY_BESIDE_ENGINE)
    toy.plan_changes = {"preflight": preflight(health_checks=(not_on("n1"),))}
    toy.submit()
    wait_for(lambda: toy.events("run_requeued"), "its requeue", tell=toy.words)
    assert toy.events("run_requeued")[0]["without"] == ["n1"]
    assert ask(["squeue", "-h", "-j", toy.job, "-o", "%x"]).strip() == "n1", toy.words()
    toy.wait_for_state(RunState.DONE)
    toy.assert_nothing_is_left()
    assert toy.snapshot().attempt == 2
    toy.wait_for_words("on n2", "inference-0", attempt=2)
    toy.wait_for_words("on n3", "trainer-0", attempt=2)


@pytest.mark.parametrize("is_known", [False, True], ids=["the job may not requeue", "it was excluded before"])
def test_with_too_few_good_nodes_the_run_ends_with_94_naming_node_and_check(
    new_toy: Callable[..., SlurmToy], is_known: bool
) -> None:
    """A node that is allocated again although the job excluded it ends the run: the next attempt would be the same."""
    toy = add_roles(new_toy(requeue=is_known), SAY)
    toy.plan_changes = {"preflight": preflight(health_checks=(not_on("n2"),))}
    toy.prepare()
    if is_known:
        write_json(toy.run.state, {"attempt": 0, "nodes": {"ever_excluded": ["n2"]}})
    toy.submit()
    toy.wait_for_state(RunState.FAILED)
    toy.assert_nothing_is_left()
    failure = read_json(toy.run.failure)
    assert (failure["node"], failure["check"], failure["exit_code"]) == ("n2", "site", ExitCode.BAD_NODE)
    assert "the fabric of n2 is down" in failure["message"]
    wait_for(lambda: (fact := toy.accounted()) is not None and fact.exit_code == 94, "its code in accounting")
    assert bool(toy.events("nodes_bad_again")) is is_known
    assert not toy.events("role_started")


def test_a_signal_during_the_preflight_ends_the_run_with_its_own_reason(
    new_toy: Callable[..., SlurmToy],
) -> None:
    toy = add_roles(new_toy(), SAY)
    toy.plan_changes = {"preflight": preflight(health_checks=("sleep 900",))}
    toy.submit()
    wait_for(lambda: toy.events("attempt_started"), "its supervisor", tell=toy.words)
    subprocess.run(["scancel", "--batch", "--signal=USR2", toy.job], check=True)
    toy.wait_for_state(RunState.STOPPED)
    toy.assert_nothing_is_left()
    state = read_json(toy.run.state)
    assert "the walltime ended before a new checkpoint" in state["message"]
    assert not toy.events("role_started") and "took over this run directory" not in toy.words()


# -- nodes that are lost later ---------------------------------------------------------------------


def with_spares(toy: SlurmToy, spares: int) -> SlurmToy:
    """A head node that stays, and a node with an engine and a trainer."""
    toy.recipe = TOY_RECIPE | {"recovery": {"in_place": True}}
    toy.add(Role.ROUTER, SERVE, OnExit.RESTART, nodes=(0,))
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART, nodes=(1,))
    toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE, nodes=(1,))
    toy.plan_changes = {"spare_nodes": spares}
    return toy


def wait_until_on(toy: SlurmToy, node: str, life: int) -> None:
    def is_there(process: str) -> bool:
        path = toy.run.endpoint(process)
        return path.exists() and (toy.endpoint(process)["host"], toy.endpoint(process)["incarnation"]) == (
            node,
            life,
        )

    for process in ("inference-0", "trainer-0"):
        wait_for(lambda process=process: is_there(process), f"{process} on {node}", toy.words)


def test_roles_of_a_lost_node_move_to_a_spare_and_the_run_ends_in_the_same_attempt(
    new_toy: Callable[..., SlurmToy],
) -> None:
    """A power cut of the engine's and the trainer's node; then the spare that took its place is lost too."""
    toy = with_spares(new_toy(), spares=2)
    job = toy.submit()
    toy.wait_until_ready("router-0", "inference-0", "trainer-0")
    try:
        toy.cluster.tool("kill-node", "n2")
        wait_until_on(toy, "n3", 1)
        call_down("n3")
        wait_until_on(toy, "n4", 2)
        toy.wait_for_words("goes on after 1", "trainer-0")
        (toy.run.root / "enough").touch()
        toy.wait_for_state(RunState.DONE)
    finally:
        toy.cluster.tool("return-node", "n2")
        resume_nodes("n3")
    toy.assert_nothing_is_left()
    assert toy.job == job and toy.snapshot().attempt == 1 and toy.fact().state == "COMPLETED"
    moves = [(row["node"], row["spare"]) for row in toy.events("node_excluded")]
    assert moves == [("n2", "n3"), ("n3", "n4")]
    assert read_json(toy.run.state)["processes"]["router-0"]["incarnation"] == 0


def test_without_a_remaining_spare_the_run_is_requeued(new_toy: Callable[..., SlurmToy]) -> None:
    toy = with_spares(new_toy(), spares=1)
    toy.submit()
    toy.wait_until_ready("router-0", "inference-0", "trainer-0")
    try:
        call_down("n2")
        wait_until_on(toy, "n3", 1)
        call_down("n3")
        wait_for(lambda: toy.events("run_requeued"), "its requeue", tell=toy.words)
    finally:
        resume_nodes("n2", "n3")
    assert toy.events("run_requeued")[0]["without"] == ["n2", "n3"]
    # of four nodes it excludes two and needs three: let it have them again
    subprocess.run(["scontrol", "update", f"JobId={toy.job}", "ExcNodeList="], check=True)
    toy.wait_until_ready("router-0", "inference-0", "trainer-0", attempt=2)
    toy.wait_for_words("goes on after 1", "trainer-0", attempt=2)
    toy.finish()


# -- how fast the nodes are given back
# -----------------------------------------------------------------------------------

# has a child in a session of its own, and ends at its own time
STUBBORN = (
    SAY
    + """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(7200)", str(run.root)], start_new_session=True)
publish_endpoint(run, name, "http://x:1")
time.sleep(7200)
"""
)


@pytest.mark.parametrize(
    "train, state",
    [
        (TRAIN, RunState.DONE),
        (TRAIN.replace("sys.exit(0 if is_last else 75)", "raise SystemExit('no luck')"), RunState.FAILED),
    ],
    ids=["a clean finish", "a crash"],
)
def test_nodes_are_released_although_a_server_ignores_sigterm(
    new_toy: Callable[..., SlurmToy], train: str, state: RunState
) -> None:
    toy = new_toy()
    toy.add(Role.INFERENCE, STUBBORN, OnExit.RESTART, nodes=(0,))
    toy.add(Role.TRAINER, train, OnExit.ENDS_PHASE, nodes=(1, 2))
    toy.submit()
    toy.wait_until_ready("inference-0", "trainer-0")
    (toy.run.root / "enough").touch()
    toy.wait_for_state(state)
    toy.cluster.wait_until_idle()
    toy.assert_nothing_is_left()


@pytest.fixture
def cluster_by_parents(
    users_folder: Path, virtual_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    """A second cluster without control groups, which identifies the processes of a step only by their parents."""
    folder = users_folder / "mine"  # SLURM's sockets in it must have short paths
    made = Cluster(folder, ClusterUser(USERS[0], folder))
    made.tool("up", "--no-accounting", "--requeue-delay", "8", "--tracking", "linuxproc", *WITH_USERS)
    monkeypatch.setenv("PATH", f"{made.folder / 'bin'}:{os.environ['PATH']}")
    assert made.user is not None
    Acting.let(made.user, tmp_path, monkeypatch)
    yield made
    made.tool("down", "--purge")


def test_no_process_remains_with_proctrack_linuxproc(cluster_by_parents: Cluster, tmp_path: Path) -> None:
    """The epilog of that cluster, which ends escaped processes, finds none after a requeue, a cancel and a
    completion."""
    toy = SlurmToy(cluster_by_parents, tmp_path / "run")
    toy.add(Role.INFERENCE, STUBBORN, OnExit.RESTART, nodes=(0,))
    toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE, nodes=(1, 2))
    toy.submit()
    toy.wait_until_ready("inference-0", "trainer-0")
    subprocess.run(["scancel", "--batch", "--signal=USR2", toy.job], check=True)
    toy.wait_until_ready("inference-0", "trainer-0", attempt=2)
    assert run_cli("cancel", str(toy.run.root), "--wait").returncode == 0
    toy.assert_nothing_is_left()
    toy.submit()
    toy.wait_until_ready("inference-0", "trainer-0", attempt=3)
    toy.finish()
    assert not (cluster_by_parents.folder / "log" / "strays").exists()
