"""Order of hosts by the switches of ``scontrol show topology``, and their assignment to the nodes of a plan."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from submitit.slurm.slurm import _parse_node_list

from primerl_hpc.common.names import Role
from primerl_hpc.runtime.allocation import Allocation, arrange_by_switch, near_each_other
from primerl_hpc.slurm.topology import by_switch, parse_topology
from tests.support.helpers import TOY_RECIPE, make_plan, process_plan

TREE = """SwitchName=s0 Level=0 LinkSpeed=1 Nodes=tux[0-3]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=tux[4-7]
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=tux[8-11]
SwitchName=s3 Level=1 LinkSpeed=1 Nodes=tux[0-11] Switches=s[0-2]
"""
"""The example of slurm.schedmd.com/topology.html."""
INTERLEAVED = """SwitchName=top Level=2 LinkSpeed=1 Nodes=n[1-8] Switches=left,right
SwitchName=left Level=1 LinkSpeed=1 Nodes=n[1,3,5,7] Switches=a,b
SwitchName=right Level=1 LinkSpeed=1 Nodes=n[2,4,6,8] Switches=c
SwitchName=a Level=0 LinkSpeed=1 Nodes=n[1,5]
SwitchName=b Level=0 LinkSpeed=1 Nodes=n[3,7]
SwitchName=c Level=0 LinkSpeed=1 Nodes=n[2,4,6,8]
"""
BLOCKS = """BlockName=b1 BlockIndex=0 Nodes=n[1,4] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=n[2,5] BlockSize=2
BlockName=b3 BlockIndex=2 Nodes=n[3,6] BlockSize=2
AggregatedBlock=b[1,3] BlockIndex=3 Nodes=n[1,3-4,6] BlockSize=4
"""
N8 = [f"n{number}" for number in range(1, 9)]


def parse(output: str) -> dict[str, tuple[int, ...]]:
    return parse_topology(output, _parse_node_list)


def test_hosts_of_a_switch_are_together_and_the_first_host_stays_first() -> None:
    assert by_switch(["tux5", "tux0", "tux4", "tux9"], parse(TREE)) == ["tux5", "tux4", "tux0", "tux9"]
    assert by_switch(N8, parse(INTERLEAVED)) == ["n1", "n5", "n3", "n7", "n2", "n4", "n6", "n8"]
    assert by_switch(N8[:6], parse(BLOCKS)) == ["n1", "n4", "n3", "n6", "n2", "n5"]


@pytest.mark.parametrize(
    "output", ["", "No topology information available\n", "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-4]\n"]
)
def test_hosts_keep_their_order_if_the_topology_does_not_contain_all(output: str) -> None:
    assert by_switch(N8, parse(output)) == N8


@given(st.permutations(N8), st.integers(1, 8))
def test_no_switch_is_left_and_entered_again(hosts: list[str], count: int) -> None:
    switches = parse(INTERLEAVED)
    ordered = by_switch(hosts[:count], switches)
    assert sorted(ordered) == sorted(hosts[:count]) and ordered[0] == hosts[0]
    for depth in (1, 2, 3):
        groups = [switches[host][:depth] for host in ordered]
        changes = sum(before != after for before, after in pairwise(groups))
        assert changes == len(set(groups)) - 1


def plan_of(folder: Path, *spans: tuple[int, ...]):
    roles = (Role.TRAINER, Role.INFERENCE)
    processes = [
        process_plan(role).model_copy(update={"nodes": nodes})
        for role, nodes in zip(roles, spans, strict=False)
    ]
    return make_plan(folder, TOY_RECIPE, processes=processes)


def test_the_nodes_of_a_role_share_switches_and_its_tasks_keep_the_order_of_slurm(tmp_path: Path) -> None:
    job = Allocation(tuple(N8[:7]), 1, False, 0, job_id="7", spares=("n8",), order=tuple(N8))
    found = near_each_other(job, plan_of(tmp_path, (0, 1, 2, 3)), parse(INTERLEAVED))
    assert found.hosts == ("n1", "n3", "n5", "n7", "n2", "n4", "n6") and found.spares == ("n8",)
    assert found.hosts_of((0, 1, 2, 3)) == list(found.hosts[:4])
    overlapping = near_each_other(job, plan_of(tmp_path, (0, 1, 2), (2, 3)), parse(INTERLEAVED))
    assert overlapping.hosts[:4] == ("n1", "n3", "n5", "n7")
    engines = near_each_other(job, plan_of(tmp_path), parse(INTERLEAVED))
    assert engines.hosts == ("n1", "n5", "n3", "n7", "n2", "n4", "n6")


def test_slurm_is_asked_for_the_topology_and_may_not_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Allocation(tuple(N8), 1, False, 0, job_id="7", order=tuple(N8))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "topology").write_text(INTERLEAVED)
    scontrol = tmp_path / "scontrol"
    for body, first in ((f'[ "$*" = "show topology" ] && cat {tmp_path}/topology', "n5"), ("exit 1", "n2")):
        scontrol.write_text(f"#!/bin/sh\n{body}\n")
        scontrol.chmod(0o755)
        assert asyncio.run(arrange_by_switch(job, plan_of(tmp_path / "run"))).hosts[1] == first
