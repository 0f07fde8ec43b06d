"""`doctor --nodes` on a real SLURM: a firewall and a slow node are named; the network of the nodes is a real one."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.common.document import dump_yaml, load_yaml
from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.plan.plan import OnExit, SumsPlan
from tests.support.helpers import PATIENCE_S, ROOT
from tests.support.virtual_slurm import SAY, Cluster, SlurmToy, preflight, run_cli

VIRTUAL = ROOT / "cluster_profiles" / "virtual.yaml"
SLOW = "tc qdisc add dev eth0 root tbf rate 100mbit burst 64kb latency 200ms"
FAST = "tc qdisc del dev eth0 root"


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(dump_yaml({**load_yaml(VIRTUAL).values, "runs_dir": str(tmp_path / "runs")}))
    return str(path)


def nodes_of(profile: str, *words: str) -> dict[str, dict[str, Any]]:
    done = run_cli("doctor", "--profile", profile, "--json", *words)
    found = {finding["what"]: finding for finding in json.loads(done.stdout)}
    assert (done.returncode == 0) == all(finding["is_ok"] for finding in found.values()), done.stderr
    return {what.removeprefix("nodes: "): row for what, row in found.items() if what.startswith("nodes: ")}


@contextlib.contextmanager
def changed(cluster: Cluster, node: str, add: str, remove: str) -> Iterator[None]:
    cluster.on(node, *add.split())
    try:
        yield
    finally:
        cluster.on(node, *remove.split())


def test_a_firewall_between_two_nodes_is_named_with_both(
    cluster: Cluster, acting_user: object, profile: str
) -> None:
    fine = nodes_of(profile, "--nodes", "2")
    assert fine["connections"]["is_ok"] and "all-reduce" not in fine, fine
    address = cluster.on("n1", "getent", "hosts", "n2").split()[0]
    ports = f"to {address} ipproto tcp dport 32768-60999 pref 100"
    cluster.wait_until_idle()  # so that the next job gets the same two nodes
    with changed(cluster, "n1", f"ip rule add {ports} prohibit", f"ip rule del {ports}"):
        found = nodes_of(profile, "--nodes", "2", "--bandwidth")
    blocked = found["connections"]
    assert not blocked["is_ok"] and blocked["said"].startswith(f"n1 cannot connect to n2 ({address}:"), (
        blocked
    )
    assert "firewall" in blocked["hint"] and "cannot connect" in found["all-reduce"]["said"]


@pytest.mark.slow
def test_a_node_with_a_slow_network_is_named_and_can_be_excluded(
    cluster: Cluster, acting_user: object, profile: str, tmp_path: Path
) -> None:
    with changed(cluster, "n3", SLOW, FAST):
        found = nodes_of(profile, "--nodes", "4", "--bandwidth")
    slow = found["all-reduce"]
    assert not slow["is_ok"] and "n3" in slow["said"] and "n1" not in slow["said"], slow
    assert "scheduler.exclude=n3" in slow["hint"]
    assert found["connections"]["is_ok"] and "GB/s" in found["file reads"]["said"], found
    assert not list((tmp_path / "runs").rglob("*")), "the files of the measurement remain"


@pytest.mark.slow
def test_a_spare_replaces_a_node_with_a_slow_network_before_the_first_process(
    new_toy: Callable[..., SlurmToy],
) -> None:
    toy = new_toy(spare_nodes=2)
    toy.add(Role.TRAINER, SAY, OnExit.ENDS_PHASE, nodes=(0, 1))
    wants = SumsPlan(
        argv=(sys.executable,), nodes=(0, 1), accelerator="cpu", ranks_per_node=1, timeout_s=int(PATIENCE_S)
    )
    checks = preflight().model_copy(update={"bandwidth": wants})
    toy.plan_changes = {"spare_nodes": 2, "preflight": checks}
    with changed(toy.cluster, "n2", SLOW, FAST):
        toy.submit()
        toy.wait_for_state(RunState.DONE)
    toy.assert_nothing_is_left()
    (measured,) = toy.events("bandwidth_measured")
    assert "n2" in measured["slow"] and "all-reduce" in measured["said"], measured
    excluded = {row["node"]: row for row in toy.events("node_excluded")}
    assert excluded["n2"]["spare"] in ("n3", "n4") and "all-reduce" in excluded["n2"]["why"], excluded
    hosts = read_json(toy.run.state)["hosts"]
    assert len(hosts) == 2 and "n2" not in hosts
    toy.wait_for_words(f"on {hosts[1]} node 1", "trainer-0_1")
