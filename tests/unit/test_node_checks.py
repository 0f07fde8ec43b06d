"""What a node finds out about itself, on this machine; and how the head judges it."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.files import read_json, write_json
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.plan.types import PreflightPlan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.runtime import node_checks
from primerl_hpc.runtime.allocation import Allocation
from primerl_hpc.runtime.node_checks import Finding, GpuFacts, examine, judge_clock, judge_gpus, make_request
from primerl_hpc.runtime.preflight import Preflight


def levels(findings: list[Finding]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for finding in findings:
        found.setdefault(finding.check, set()).add(finding.level)
    return found


@pytest.fixture
def request_of(tmp_path: Path):
    """A request as the planner would have it, for a node without GPUs."""

    def make(**changes: Any) -> dict[str, Any]:
        plan = compile_plan(
            load_recipe("reverse_text/tiny").recipe,
            load_profile("virtual").profile,
            run_dir=str(tmp_path),
            python=sys.executable,
        )
        assert plan.preflight is not None and plan.preflight.pythons == (sys.executable,)
        wants = plan.preflight.model_dump(mode="json") | {"scratch": str(tmp_path / "scratch"), **changes}
        return make_request(wants, nonce="n", head=None)

    return make


def test_this_machine_is_fit_and_says_so_beside_the_request(
    request_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    path = tmp_path / "preflight" / "request.json"
    write_json(path, request_of(health_checks=["echo fine"], interface="lo"))
    assert node_checks.main([str(path)]) == 0
    result = read_json(path.with_name("n7.json"))
    assert result["node"] == "n7" and result["nonce"] == "n"
    assert {finding["level"] for finding in result["findings"]} == {"ok"}, result
    assert "ports of 127.0.0.1 can be bound and reached" in {each["said"] for each in result["findings"]}


@pytest.mark.parametrize(
    "check, changes, words",
    [
        ("scratch", {"scratch": "/proc/nowhere"}, "cannot be written"),
        ("scratch", {"min_scratch_gib": 1e9}, "GiB free"),
        ("memory", {"min_memory_gib": 1e9}, "GiB available"),
        ("network", {"interface": "ib7"}, "no IPv4 address on interface ib7"),
        ("site", {"health_checks": ["true", "echo link is down; exit 3"]}, "ended with 3: link is down"),
    ],
)
def test_what_a_node_lacks_is_bad(request_of, check: str, changes: dict[str, Any], words: str) -> None:
    bad = [finding for finding in examine(request_of(**changes)) if finding.level == "bad"]
    assert [finding.check for finding in bad] == [check] and words in bad[0].said


def test_other_versions_are_told_and_a_missing_interpreter_is_bad(request_of) -> None:
    request = request_of()
    request["versions"][sys.executable]["numpy"] = "0.1"
    request["versions"]["/no/python"] = {"python": "3.11.0"}
    told = [finding for finding in examine(request) if finding.check == "versions"]
    assert [finding.level for finding in told] == ["warn", "bad"]
    assert "head 0.1" in told[0].said and "/no/python" in told[1].said


def test_a_host_name_that_does_not_resolve_is_bad(request_of) -> None:
    assert levels(examine(request_of() | {"head": "nowhere.invalid"}))["host names"] == {"bad"}


HEALTHY = GpuFacts(0, "H100", 0, False, False, 0, 0.1)


@pytest.mark.parametrize(
    "fact, level",
    [
        ({}, "ok"),
        ({"uncorrected_errors": None}, "ok"),  # a GPU without ECC
        ({"uncorrected_errors": 2}, "bad"),
        ({"is_remap_pending": True}, "bad"),
        ({"has_remap_failed": True}, "bad"),
        ({"slowed_by": 0x40}, "warn"),
        ({"slowed_by": 0x4}, "ok"),  # power cap: as configured
        ({"memory_used_gib": 30.0}, "warn"),
    ],
)
def test_a_gpu_with_memory_faults_is_bad_and_a_slow_one_is_told(fact: dict[str, Any], level: str) -> None:
    facts = [HEALTHY, replace(HEALTHY, index=1, **fact)]
    told = [each[0] for each in judge_gpus(facts, 2)]
    assert level in told and (level == "bad" or "bad" not in told)


def test_a_gpu_that_fell_off_the_bus_is_missed() -> None:
    assert [each[0] for each in judge_gpus([HEALTHY] * 7, 8)] == ["bad"]


@pytest.mark.parametrize(
    "told_at, level, side",
    [(100.5, "ok", "as on"), (90.0, "warn", "behind"), (111.0, "warn", "ahead"), (500.0, "bad", "ahead")],
)
def test_clocks_are_compared_with_the_heads_before_and_after(told_at: float, level: str, side: str) -> None:
    finding = judge_clock(told_at, asked_at=100.0, seen_at=101.0)
    assert finding.level == level and side in finding.said


def test_silent_nodes_are_asked_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No node tells anything; a step over one of them ends by itself once there is one over each."""
    srun, alone = tmp_path / "bin" / "srun", tmp_path / "alone"
    wait = f"echo >>{alone}; until [ $(wc -l <{alone}) = 6 ]; do sleep 0.02; done; touch {tmp_path}/met.$$"
    srun.parent.mkdir()
    srun.write_text(f'#!/bin/bash\ncase "$*" in *--nodes=1\\ *) {wait};; esac\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}:{os.environ['PATH']}")
    hosts = tuple(f"n{number}" for number in range(1, 7))
    six = replace(allocation(), hosts=hosts, spares=(), order=hosts)
    least = {"gpus": 0, "scratch": None, "min_scratch_gib": 0, "min_memory_gib": 0}
    wants = PreflightPlan(timeout_s=3, pythons=(), health_checks=(), **least)
    findings = asyncio.run(Preflight(RunDir(tmp_path / "run"), wants, six, tmp_path / "log").look())
    assert len(list(tmp_path.glob("met.*"))) == 6
    assert [(host, told.level) for host in hosts for told in findings[host]] == [
        (host, "bad") for host in hosts
    ]


def allocation() -> Allocation:
    everything = ("n1", "n2", "n3", "n4", "n5")
    return Allocation(
        everything[:3], 8, has_gpus=False, gpus_per_node=0, job_id="7", spares=("n4", "n5"), order=everything
    )


def test_a_spare_takes_the_place_of_a_bad_host_and_a_bad_spare_of_none() -> None:
    after = allocation().without({"n2", "n4"})
    assert after is not None and after.hosts == ("n1", "n5", "n3") and after.spares == ()
    assert after.hosts_of((1, 2)) == ["n3", "n5"]  # SLURM counts the tasks of a step in its own order


def test_too_few_spares_are_too_few() -> None:
    assert allocation().without({"n1", "n2", "n3"}) is None
    only_spares = allocation().without({"n4", "n5"})
    assert only_spares is not None and only_spares.hosts == ("n1", "n2", "n3")
