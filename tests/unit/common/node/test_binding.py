"""CPUs of each accelerator: from a profile's map and from a node's own topology, and what a process does with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.node.binding import Binding, bind_process, describe_cpus, gpu_addresses, parse_cpus
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe


@given(st.frozensets(st.integers(0, 300), min_size=1))
def test_a_list_of_cpus_is_read_back(cpus: frozenset[int]) -> None:
    assert parse_cpus(describe_cpus(cpus)) == cpus


def test_a_list_of_cpus_is_read_in_the_kernels_notation() -> None:
    assert parse_cpus("0-3,8") == {0, 1, 2, 3, 8} and parse_cpus("") == frozenset()
    with pytest.raises(ValueError, match="first CPU is greater"):
        parse_cpus("3-1")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """/sys and /proc of a node with two NUMA nodes and two NVIDIA GPUs; the first GPU is next to the second node."""
    sys_root, proc_root = tmp_path / "sys", tmp_path / "proc"
    for node, cpus in enumerate(("0-3", "4-7")):
        write(sys_root / f"devices/system/node/node{node}/cpulist", f"{cpus}\n")
    for address, cpus in {"0000:07:00.0": "4-7", "0000:85:00.0": "0-3"}.items():
        write(sys_root / f"bus/pci/devices/{address}/local_cpulist", f"{cpus}\n")
        (proc_root / "driver/nvidia/gpus" / address).mkdir(parents=True)
    return sys_root, proc_root


def test_a_node_reports_the_cpus_next_to_its_gpus(roots: tuple[Path, Path]) -> None:
    own = Binding(num_accelerators=2).cpus_by_accelerator(*roots)
    assert own == [{4, 5, 6, 7}, {0, 1, 2, 3}]
    assert Binding(numa=(1, 0), num_accelerators=2).cpus_by_accelerator(*roots) == own
    assert Binding(cpus=("4-7", "0-3"), num_accelerators=2).cpus_by_accelerator(*roots) == own


def test_a_job_with_a_part_of_the_node_is_not_bound(roots: tuple[Path, Path]) -> None:
    assert Binding(num_accelerators=1).cpus_by_accelerator(*roots) is None


def test_gpus_of_amd_are_found_by_their_location(tmp_path: Path) -> None:
    for node, properties in enumerate(("simd_count 0\n", "simd_count 440\nlocation_id 49408\ndomain 0\n")):
        write(tmp_path / f"class/kfd/kfd/topology/nodes/{node}/properties", properties)
    assert gpu_addresses(tmp_path, tmp_path) == ["0000:c1:00.0"]


def bound_cpus(accelerators: list[int], binding: Binding) -> tuple[str, set[int]]:
    """Return the result of `bind_process` in a separate process, and the CPUs of that process afterwards."""
    code = (
        "import json, os, sys; from primerl_hpc.common.node.binding import Binding, bind_process\n"
        "values = json.loads(sys.argv[1])\n"
        "said = bind_process(Binding.from_json(values), values['accelerators'])\n"
        "print(json.dumps([said, sorted(os.sched_getaffinity(0))]))"
    )
    values = {
        "cpus": binding.cpus,
        "num_accelerators": binding.num_accelerators,
        "accelerators": accelerators,
    }
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(values)], capture_output=True, text=True, check=True
    )
    said, cpus = json.loads(done.stdout)
    return said, set(cpus)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_process_runs_on_the_cpus_of_its_accelerator() -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    binding = Binding(cpus=(str(first), str(second)), num_accelerators=2)
    assert bound_cpus([1], binding) == (f"bound to CPUs {second} of accelerators 1", {second})
    assert bound_cpus([0, 1], binding) == ("", os.sched_getaffinity(0))


def test_cpus_outside_of_the_job_leave_the_process_as_it_is() -> None:
    said, cpus = bound_cpus([0], Binding(cpus=("4000", "4001"), num_accelerators=2))
    assert said == "not bound: CPUs 4000 do not belong to the job" and cpus == os.sched_getaffinity(0)


def test_without_a_binding_nothing_happens() -> None:
    assert bind_process(None, [0]) == ""


SHOW = "import json, os; print(json.dumps(sorted(os.sched_getaffinity(0))))"
AS_ENGINE = ["-m", "primerl_hpc.runtime.steps.guard", "--", sys.executable, "-c", SHOW]
AS_RANK = ["-c", f"from primerl_hpc.common.node.binding import bind_rank; bind_rank(1); {SHOW}"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("role", ["inference", "trainer"])
def test_an_engine_under_its_guard_and_a_rank_run_where_the_plan_binds_them(role: str) -> None:
    """The variable is the one that the planner makes: slots 1 and 2 of three, on two CPUs."""
    first, second, *_ = sorted(os.sched_getaffinity(0))
    node = {"gpus": 0, "cpu_slots": 3, "cpus_of_gpu": [str(first), str(first), str(second)]}
    profile = Profile.model_validate({"name": "p", "scheduler": {"type": "local"}, "node": node})
    plan = compile_plan(load_recipe("reverse_text/tiny").recipe, profile, run_dir="/r", python="/py")
    values = json.loads(plan.phase("main").process(f"{role}-0").env["PRIMERL_BINDING"])
    assert values["cpus"] == [str(first), str(first), str(second)] and values["num_accelerators"] == 3
    assert values["is_engine"] is (role == "inference")
    values["accelerators"] = [2] if role == "inference" else [0, 2]
    done = subprocess.run(
        [sys.executable, *(AS_ENGINE if role == "inference" else AS_RANK)],
        env=os.environ | {"PRIMERL_BINDING": json.dumps(values)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [second] and f"binding: bound to CPUs {second}" in done.stderr
