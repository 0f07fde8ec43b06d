"""Heterogeneous jobs: the orchestrator's node is in the CPU partition, and everything else of a run is as usual."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from primerl_hpc.cluster.node_types import NodeType
from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.plan.plan import OnExit
from primerl_hpc.slurm.commands import ask
from tests.support.helpers import wait_for
from tests.support.virtual_slurm import SAY, SERVE, TRAIN, SlurmToy, not_on, preflight, run_cli

CPU_HOST = "n5"


def add_roles(toy: SlurmToy) -> SlurmToy:
    toy.has_cpu_node = True
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART, nodes=(0,))
    toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE, nodes=(0, 1))
    toy.add(Role.ROUTER, SERVE, OnExit.RESTART, nodes=(2,))
    return toy


def node_of(toy: SlurmToy, index: int) -> str:
    """The host of a node of the plan."""
    return read_json(toy.run.state)["hosts"][index]


def requeue_cancel_and_resume(toy: SlurmToy, *servers: str) -> None:
    """Warn the run of its walltime, cancel its second attempt, and resume it until it is done."""
    subprocess.run(["scancel", "--batch", "--signal=USR2", toy.job], check=True)
    toy.wait_until_ready(*servers, attempt=2)
    toy.wait_for_words("goes on after 2", "trainer-0_0", attempt=2)
    assert run_cli("cancel", str(toy.run.root), "--wait").returncode == 0
    toy.assert_nothing_is_left()
    toy.submit()
    toy.wait_until_ready("trainer-0", attempt=3)
    toy.finish()


def test_roles_are_on_their_component_and_a_run_is_requeued_cancelled_and_resumed(
    new_toy: Callable[..., SlurmToy],
) -> None:
    """Each component has its own preflight; the spare replaces a bad node of the second one."""
    toy = add_roles(new_toy(spare_nodes=1))
    toy.plan_changes = {"preflight": preflight(health_checks=(not_on("n2"),))}
    toy.submit()
    toy.wait_until_ready("inference-0", "trainer-0", "router-0")
    assert toy.snapshot().state == RunState.RUNNING
    assert toy.endpoint("router-0")["host"] == read_json(toy.run.state)["host"] == CPU_HOST
    assert toy.endpoint("inference-0")["host"] == "n1"
    toy.wait_for_words("on n1 node 0", "trainer-0_0")
    toy.wait_for_words("on n3 node 1", "trainer-0_1")
    assert [row["nodes"] for row in toy.events("preflight_done")] == [4]
    wait_for(lambda: {"inference-0", "router-0"} <= set(toy.steps()), "accounting", tell=toy.steps)
    toy.cluster.on("n1", "kill", "-9", str(toy.endpoint("inference-0")["pid"]))
    wait_for(lambda: toy.events("role_restarting"), "its restart", tell=toy.words)

    requeue_cancel_and_resume(toy, "inference-0", "trainer-0", "router-0")
    assert ask(["squeue", "--noheader"]) == ""


@pytest.mark.slow
def test_roles_run_on_nodes_of_their_type_and_a_spare_node_replaces_one_of_its_own_type(
    new_toy: Callable[..., SlurmToy],
) -> None:
    """Engines on the nodes of partition cpu, which lead the job; the trainer on the profile's `node`."""
    toy = new_toy(spare_nodes=1)
    small = NodeType(nodes=1, partition="cpu", gpus=0, cpu_slots=1, cores=16, memory="16G")
    toy.profile = toy.profile.model_copy(update={"node_types": {"small": small}})
    toy.node_types = ("small", None, None)
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART, nodes=(0,))
    toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE, nodes=(1, 2))
    toy.plan_changes = {"preflight": preflight(health_checks=(not_on("n2"),))}
    toy.submit()
    toy.wait_until_ready("inference-0", "trainer-0")
    assert toy.endpoint("inference-0")["host"] == read_json(toy.run.state)["host"] == CPU_HOST
    toy.wait_for_words("on n1 node 0", "trainer-0_0")
    toy.wait_for_words("on n3 node 1", "trainer-0_1")
    assert [row["nodes"] for row in toy.events("preflight_done")] == [4]

    requeue_cancel_and_resume(toy, "inference-0", "trainer-0")


def test_a_crash_on_the_other_component_is_reported_and_ends_both(toy: SlurmToy) -> None:
    add_roles(toy)
    toy.processes = toy.processes[::2]
    toy.add(
        Role.TRAINER, SAY + "raise SystemExit('error: the loss is a teapot')", OnExit.ENDS_PHASE, nodes=(1,)
    )
    toy.submit()
    toy.wait_for_state(RunState.FAILED)
    toy.assert_nothing_is_left()
    told = run_cli("diagnose", str(toy.run.root)).stdout
    assert "teapot" in told and "n2" in told
    wait_for(lambda: (fact := toy.accounted()) is not None and fact.exit_code == 1, "its code in accounting")


@pytest.mark.slow
def test_scancel_of_a_heterogeneous_job_ends_both_components_and_the_run_resumes(toy: SlurmToy) -> None:
    """SLURM kills the steps of component 1 without a signal to the batch process: there may be no time for a save."""
    add_roles(toy).submit()
    toy.wait_until_ready("trainer-0")
    subprocess.run(["scancel", toy.job], check=True)
    wait_for(
        lambda: toy.snapshot().state in (RunState.CANCELLED, RunState.STOPPED), "its end", tell=toy.words
    )
    toy.assert_nothing_is_left()
    assert toy.fact().state == "CANCELLED"
    saved = toy.run.latest_checkpoint()
    toy.submit()
    toy.wait_until_ready("trainer-0", attempt=2)
    toy.wait_for_words(f"goes on after {saved}", "trainer-0_0", attempt=2)
    toy.finish()


@pytest.mark.slow
def test_preemption_and_node_loss_of_one_component_requeue_both(new_toy: Callable[..., SlurmToy]) -> None:
    """SLURM requeues only the CPU node's component when that node is lost; the run then requeues the complete job."""
    toy = add_roles(new_toy(partition="preemptible"))
    assert toy.profile.cpu_partition is not None
    cpu = toy.profile.cpu_partition.model_copy(update={"partition": "preemptible"})
    toy.profile = toy.profile.model_copy(update={"cpu_partition": cpu})
    toy.submit()
    toy.wait_until_ready("inference-0", "trainer-0", "router-0")
    urgent = ask(["sbatch", "--parsable", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600"])
    toy.wait_for_job("PENDING")
    assert toy.run.latest_checkpoint() == 2
    subprocess.run(["scancel", urgent.strip()], check=True)

    toy.wait_until_ready("inference-0", "trainer-0", "router-0", attempt=2)
    with toy.cluster.without_power(node_of(toy, 1)):
        toy.wait_until_ready("inference-0", "trainer-0", "router-0", attempt=3)
    assert toy.run.latest_checkpoint() == 3  # its other node received a signal and saved

    with toy.cluster.without_power(node_of(toy, 2)):
        wait_for(lambda: toy.hurry() or toy.events("came_back_alone"), "the head, alone", tell=toy.words)
        toy.wait_until_ready("inference-0", "trainer-0", "router-0", attempt=5)
        assert len(toy.events("came_back_alone")) == 1
        saved = toy.run.latest_checkpoint()
        # that requeue signals the remaining trainer, which may have saved once more
        assert saved in (3, 4)
        toy.wait_for_words(f"goes on after {saved}", "trainer-0_0", attempt=5)
        (toy.run.root / "enough").touch()
        toy.wait_for_state(RunState.DONE)
    toy.assert_nothing_is_left()
    assert ask(["squeue", "--noheader"]) == ""


@pytest.mark.slow
def test_a_lost_head_node_without_requeue_fails_the_run_and_frees_the_other_component(
    new_toy: Callable[..., SlurmToy],
) -> None:
    toy = add_roles(new_toy(requeue=False))
    toy.submit()
    toy.wait_until_ready("inference-0", "trainer-0", "router-0")
    with toy.cluster.without_power(CPU_HOST):
        toy.wait_for_state(RunState.FAILED)
        wait_for(lambda: not ask(["squeue", "--noheader"]).strip(), "the end of its other component")
        wait_for(lambda: not toy.cluster.processes_of(toy.run), "the end of every process")
