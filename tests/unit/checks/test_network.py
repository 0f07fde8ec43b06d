"""Pairs of nodes, connections and judgement of bandwidth (tests/slurm measures between real nodes)."""

from __future__ import annotations

import socket
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.checks.network import (
    BLOCK,
    FILE_BYTES,
    LEAST_SHARE,
    ROUNDS,
    Listener,
    Rates,
    SlowNodes,
    connect_to,
    judge_connections,
    judge_nodes,
    read_file,
    rounds_of,
    slow_nodes,
    write_file,
)
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.document import load_yaml
from primerl_hpc.common.names import Role
from primerl_hpc.plan.preflight import bandwidth_plan
from tests.support.helpers import ROOT, process_plan


@given(st.integers(2, 40))
def test_every_node_meets_every_other_one_once_and_at_most_one_node_rests(num_nodes: int) -> None:
    rounds = rounds_of(num_nodes, num_nodes)
    pairs = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert sorted(map(sorted, pairs)) == sorted(map(list, combinations(range(num_nodes), 2)))
    for chosen in rounds:
        assert len({node for pair in chosen for node in pair}) == 2 * len(chosen) == num_nodes - num_nodes % 2
    assert len(rounds_of(num_nodes, ROUNDS)) <= ROUNDS


@given(st.integers(4, 12), st.data(), st.floats(0.01, LEAST_SHARE - 0.01), st.floats(1, 400))
def test_a_slow_node_is_named_and_its_partners_are_not(
    num_nodes: int, data: st.DataObject, share: float, rate: float
) -> None:
    """A pair is as fast as the slower of its nodes; the best pair of a node counts."""
    slow = data.draw(st.integers(0, num_nodes - 1))
    best = dict.fromkeys(range(num_nodes), 0.0)
    for pairs in rounds_of(num_nodes, ROUNDS):
        for pair in pairs:
            for node in pair:
                best[node] = max(best[node], rate * (share if slow in pair else 1.0))
    found = slow_nodes({f"n{node}": value for node, value in best.items()})
    assert list(found) == [f"n{slow}"] and found[f"n{slow}"] == pytest.approx(share)


def test_nodes_of_equal_speed_and_missing_measurements_are_not_slow() -> None:
    assert slow_nodes({"n1": 10.0, "n2": 9.0, "n3": 7.1}) == {}
    assert slow_nodes({}) == {} and slow_nodes({"n1": 0.0, "n2": 0.0}) == {}


def test_connections_are_greeted_and_a_closed_port_and_another_program_are_reported() -> None:
    with (
        Listener("127.0.0.1") as listener,
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.socket() as unused,
    ):
        unused.bind(("127.0.0.1", 0))
        closed = unused.getsockname()
        others = {"n1": listener.address, "n2": closed, "n3": silent.getsockname()}
        failed = connect_to(others, limit_s=5.0)
    assert set(failed) == {"n2", "n3"} and "refused" in failed["n2"] and "timed out" in failed["n3"]
    assert failed["n2"].startswith(f"127.0.0.1:{closed[1]}: ") and connect_to({}) == {}


def test_files_are_written_and_read_within_their_limits(tmp_path: Path) -> None:
    size = write_file(tmp_path / "data.bin")
    assert size == (tmp_path / "data.bin").stat().st_size and BLOCK <= size <= FILE_BYTES
    assert read_file(tmp_path / "data.bin") > 0


def test_results_name_the_nodes_and_the_way_to_exclude_them() -> None:
    slow = Rates("all-reduce", {"n1": 10.0, "n2": 10.0, "n3": 2.0}).finding("")
    assert not slow.is_ok and "n3 2 GB/s (20%)" in slow.message and "scheduler.exclude=n3" in slow.hint
    missing = Rates("all-reduce", {"n1": 10.0, "n2": None}).finding("n2: a rank exited with 1")
    assert not missing.is_ok and missing.message == "not measured: n2: a rank exited with 1"
    fine = Rates("all-reduce", {"n1": 10.0, "n2": 11.0}).finding("")
    assert fine.is_ok and "median 10.5 GB/s of 2 nodes" in fine.message
    rows = [
        {"node": "n1", "error": "", "address": "10.0.0.1", "unreachable": {"n2": "10.0.0.2:4: timed out"}},
        {"node": "n2", "error": "", "address": "10.0.0.2", "unreachable": {}},
    ]
    blocked = judge_connections(rows, 2, "")
    assert blocked.message == "n1 cannot connect to n2 (10.0.0.2:4: timed out)" and "firewall" in blocked.hint
    assert "1 of 2 nodes" in judge_connections(rows[1:], 2, "srun: error: n1: down").message
    broken = [{"node": "n1", "error": "no interface hsn0"}, rows[1]]
    assert judge_connections(broken, 2, "").message == "n1: no interface hsn0"
    assert judge_connections([{**rows[0], "unreachable": {}}, rows[1]], 2, "").is_ok


def test_an_attempt_judges_its_nodes_only_if_all_of_them_have_a_rate() -> None:
    rows: dict[str, dict[str, Any]] = {
        f"n{node}": {"node": f"n{node}", "read_gb_s": 1.0, "pairs_gb_s": {"n9": 10.0, "n8": 9.0}}
        for node in range(1, 5)
    }
    assert judge_nodes([*rows.values()], 4) == SlowNodes(
        {}, "all-reduce: 10 to 10 GB/s; file reads: 1 to 1 GB/s"
    )
    rows["n2"]["pairs_gb_s"] = {"n9": 1.0}
    rows["n3"]["read_gb_s"] = 0.5
    assert judge_nodes([*rows.values()], 4).slow == {
        "n2": "all-reduce 1 GB/s, 10% of the median",
        "n3": "file reads 0.5 GB/s, 50% of the median",
    }
    rows["n4"]["pairs_gb_s"] = {}
    assert list(judge_nodes([*rows.values()], 4).slow) == ["n3"]
    del rows["n4"]
    assert (
        judge_nodes([*rows.values()], 4).slow == {}
        and "3 of 4 nodes" in judge_nodes([*rows.values()], 4).message
    )


@pytest.mark.parametrize("wanted", ["never", "always"])
def test_the_plan_measures_the_nodes_of_the_trainer_if_the_profile_requests_it(wanted: str) -> None:
    values = dict(load_yaml(ROOT / "cluster_profiles" / "virtual.yaml").values)
    profile = Profile.model_validate({**values, "preflight": {"bandwidth": wanted}})
    trainer = process_plan(Role.TRAINER, nodes=2, argv=("python", "-m", "x"))
    plan = bandwidth_plan(profile, [trainer])
    assert (plan is None) == (wanted == "never") and bandwidth_plan(profile, []) is None
    assert plan is None or (plan.nodes, plan.argv) == ((0, 1), ("python",))
