"""Checks of a node by itself, on this machine, and the head's judgment of them."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.checks import node
from primerl_hpc.checks.findings import Finding
from primerl_hpc.checks.gpus import GpuFacts, check_gpus, judge_gpus
from primerl_hpc.checks.machine import judge_limits
from primerl_hpc.checks.node import examine, judge_clock, make_request
from primerl_hpc.checks.table import CHECKS
from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.files import read_json, write_json
from primerl_hpc.common.node.limits import RAISED
from primerl_hpc.plan.plan import PreflightPlan
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.allocation import Allocation
from primerl_hpc.runtime.job.preflight import PreflightRun, reason_on
from tests.support.helpers import PATIENCE_S


def levels(findings: list[Finding]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for finding in findings:
        found.setdefault(finding.check, set()).add(finding.level)
    return found


@pytest.fixture
def scratch() -> Iterator[str]:
    """Return a folder with a short path: the check reports one in which sockets may fail."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


@pytest.fixture
def request_of(tmp_path: Path, scratch: str):
    """A request as the planner would have it, for a node without GPUs."""

    def make(**changes: Any) -> dict[str, Any]:
        plan = compile_plan(
            load_recipe("reverse_text/tiny").recipe,
            load_profile("virtual").profile,
            run_dir=str(tmp_path),
            python=sys.executable,
        )
        assert plan.preflight is not None and plan.preflight.pythons == (sys.executable,)
        wants = plan.preflight.model_dump(mode="json") | {"scratch": scratch, **changes}
        return make_request(wants, nonce="n", head=None)

    return make


def test_this_machine_passes_and_its_findings_are_written_next_to_the_request(
    request_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    path = tmp_path / "preflight" / "request.json"
    write_json(path, request_of(health_checks=["echo fine"], interface="lo"))
    assert node.main([str(path)]) == 0
    result = read_json(path.with_name("n7.json"))
    assert result["node"] == "n7" and result["nonce"] == "n"
    assert [finding for finding in result["findings"] if finding["level"] != "ok"] == []
    assert "ports of 127.0.0.1 can be bound and reached" in {each["said"] for each in result["findings"]}


@pytest.mark.parametrize(
    "check, changes, words",
    [
        ("scratch", {"scratch": "/proc/nowhere"}, "does not exist and cannot be created"),
        ("scratch", {"min_scratch_gib": 1e9}, "GiB free"),
        ("memory", {"min_memory_gib": 1e9}, "GiB available"),
        ("network", {"interface": "ib7"}, "no IPv4 address on interface ib7"),
        ("site", {"health_checks": ["true", "echo link is down; exit 3"]}, "exited with 3: link is down"),
    ],
)
def test_a_node_without_a_requirement_is_bad(
    request_of, check: str, changes: dict[str, Any], words: str
) -> None:
    bad = [finding for finding in examine(request_of(**changes)) if finding.level == "bad"]
    assert [finding.check for finding in bad] == [check] and words in bad[0].message


def test_other_versions_are_reported_and_a_missing_interpreter_is_bad(request_of) -> None:
    request = request_of()
    request["versions"][sys.executable]["numpy"] = "0.1"
    request["versions"]["/no/python"] = {"python": "3.11.0"}
    told = [finding for finding in examine(request) if finding.check == "versions"]
    assert [finding.level for finding in told] == ["warn", "bad"]
    assert "head 0.1" in told[0].message and "/no/python" in told[1].message


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
def test_a_gpu_with_memory_faults_is_bad_and_a_slow_one_is_reported(fact: dict[str, Any], level: str) -> None:
    facts = [HEALTHY, replace(HEALTHY, index=1, **fact)]
    told = [each.level for each in judge_gpus(facts, 2)]
    assert level in told and (level == "bad" or "bad" not in told)


def test_a_gpu_that_fell_off_the_bus_is_missed() -> None:
    assert [each.level for each in judge_gpus([HEALTHY] * 7, 8)] == ["bad"]


@pytest.mark.parametrize(
    "told_at, level, side",
    [(100.5, "ok", "as on"), (90.0, "warn", "behind"), (111.0, "warn", "ahead"), (500.0, "bad", "ahead")],
)
def test_clocks_are_compared_with_the_heads_before_and_after(told_at: float, level: str, side: str) -> None:
    finding = judge_clock(told_at, asked_at=100.0, seen_at=101.0)
    assert finding.level == level and side in finding.message


def test_unresponsive_nodes_are_queried_concurrently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No node reports anything; a step over one of them ends by itself once there is one over each."""
    srun, alone = tmp_path / "bin" / "srun", tmp_path / "alone"
    wait = f"echo >>{alone}; until [ $(wc -l <{alone}) = 6 ]; do sleep 0.02; done; touch {tmp_path}/met.$$"
    srun.parent.mkdir()
    srun.write_text(f'#!/bin/bash\ncase "$*" in *--nodes=1\\ *) {wait};; esac\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}:{os.environ['PATH']}")
    hosts = tuple(f"n{number}" for number in range(1, 7))
    six = replace(allocation(), hosts=hosts, spares=(), order=hosts)
    least = {"gpus": 0, "scratch": None, "min_scratch_gib": 0, "min_memory_gib": 0}
    wants = PreflightPlan(timeout_s=int(PATIENCE_S), pythons=(), health_checks=(), **least)
    findings = asyncio.run(PreflightRun(RunDir(tmp_path / "run"), wants, six, tmp_path / "log").check())
    assert len(list(tmp_path.glob("met.*"))) == 6
    assert [(host, told.level) for host in hosts for told in findings[host]] == [
        (host, "bad") for host in hosts
    ]


def test_an_option_that_srun_does_not_know_is_the_finding_of_every_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    srun = tmp_path / "srun"
    usage = "srun: unrecognized option '--network=fast'\nTry \"srun --help\" for more information"
    srun.write_text(f"#!/bin/sh\ncat <<'END' >&2\n{usage}\nEND\nexit 1\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    least = {"gpus": 0, "scratch": None, "min_scratch_gib": 0, "min_memory_gib": 0}
    wants = PreflightPlan(timeout_s=int(PATIENCE_S), pythons=(), health_checks=(), **least)
    findings = asyncio.run(
        PreflightRun(RunDir(tmp_path / "run"), wants, allocation(), tmp_path / "log").check()
    )
    assert len(findings) == 5
    for (finding,) in findings.values():
        assert finding.level == "bad" and "unrecognized option '--network=fast'" in finding.message
        assert "remove it from scheduler.srun_extra" in finding.hint


def test_the_reason_of_another_host_is_not_taken_from_the_common_log() -> None:
    text = "srun: error: n2: task 0: Exited with exit code 1\nsrun: error: n1: task 0: Killed\n"
    assert reason_on(["n1"], text) == "n1: task 0: Killed"


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


UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    "limits, uses_rdma, level, words",
    [
        ((UNLIMITED, 10**6, UNLIMITED), True, "ok", "locked memory unlimited GiB"),
        ((64 * 2**10, 10**6, 10**5), False, "ok", ""),  # NCCL over TCP locks nothing
        ((64 * 2**10, 10**6, 10**5), True, "bad", "ulimit -H -l"),
        ((16 * 2**30, 10**6, 10**5), True, "warn", "locked memory is limited to 16 GiB"),
        ((UNLIMITED, 1024, 10**5), False, "warn", "open files are limited to 1,024"),
        ((UNLIMITED, 10**6, 100), False, "warn", "processes are limited to 100"),
    ],
)
def test_low_limits_are_reported_and_are_bad_where_rdma_could_not_start(
    limits: tuple[int, int, int], uses_rdma: bool, level: str, words: str
) -> None:
    (told,) = judge_limits(*limits, uses_rdma=uses_rdma)
    assert told.level == level and words in told.message


def test_a_node_reports_its_limits_after_raising_them(request_of) -> None:
    (finding,) = (each for each in examine(request_of()) if each.check == "limits")
    assert finding.level in ("ok", "warn") and "open files" in finding.message
    assert all(soft == hard for soft, hard in map(resource.getrlimit, RAISED))


def test_shared_memory_that_is_too_small_is_reported() -> None:
    (found,) = judge_limits(UNLIMITED, 10**6, 10**5, uses_rdma=False, shared_gib=0.06)
    assert found.level == "warn" and "0.1 GiB free in /dev/shm" in found.message


def test_each_check_of_the_table_names_a_function_of_this_folder_and_a_place_once() -> None:
    for check in CHECKS:
        module, _, name = check.function.partition(":")
        assert callable(getattr(import_module(f"primerl_hpc.checks.{module}"), name)), check
    places = [(check.name, where) for check in CHECKS for where in check.where]
    assert len(set(places)) == len(places)


# -- queries that NVML does not answer --------------------------------------------------------------


class NvmlError(Exception):
    """Stands for pynvml's errors, which need the driver's library."""


class NotSupported(NvmlError):
    pass


class GpuIsLost(NvmlError):
    pass


@dataclass(frozen=True)
class Memory:
    used: int


def nvml_without(missing: str | None, error: type[NvmlError] = NotSupported) -> types.ModuleType:
    """Return a library of one healthy GPU that does not answer the query ``missing``."""
    answers: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": 0,
        "nvmlDeviceGetName": b"GH200",
        "nvmlDeviceGetTotalEccErrors": 0,
        "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
        "nvmlDeviceGetMemoryInfo": Memory(used=2**30),
    }

    def answer(name: str) -> Any:
        if name == missing:
            raise error(name)
        return answers[name]

    library = types.ModuleType("pynvml")
    for name in answers:
        setattr(library, name, lambda *_, name=name: answer(name))
    for name in ("NotSupported", "FunctionNotFound", "NoPermission", "InvalidArgument"):
        setattr(library, f"NVMLError_{name}", NotSupported)
    library.NVMLError = NvmlError  # type: ignore[attr-defined]
    library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED = library.NVML_VOLATILE_ECC = 1  # type: ignore[attr-defined]
    return library


@pytest.mark.parametrize(
    "missing",
    [
        None,
        "nvmlDeviceGetName",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetMemoryInfo",
    ],
)
def test_a_query_that_a_gpu_does_not_support_does_not_make_its_node_bad(
    missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs that share the host's memory, and MIG instances, do not answer all of them."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml_without(missing))
    (found,) = check_gpus(1)
    assert found.level == "ok"
    assert found.message == ("1 × GPU" if missing == "nvmlDeviceGetName" else "1 × GH200")


def test_a_gpu_that_does_not_respond_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library = nvml_without("nvmlDeviceGetHandleByIndex", GpuIsLost)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    found = list(check_gpus(1))
    assert [each.level for each in found] == ["bad", "bad"] and found[0].message.startswith("GPU 0: ")
