"""Checks of a node against its profile: architecture, plugin, scratch, GPUs of AMD, the proxy; and of sums."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.checks.doctor import examine
from primerl_hpc.checks.findings import ok
from primerl_hpc.checks.gpus import count_amd_gpus, judge_count
from primerl_hpc.checks.machine import LONGEST_SCRATCH, check_scratch
from primerl_hpc.checks.ranks import make_request, result_file
from primerl_hpc.checks.sums import judge_sums
from primerl_hpc.checks.surroundings import architecture, containers, elf_arch, network_plugin, proxy
from primerl_hpc.checks.table import Subject, Where
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.files import read_json, write_json
from primerl_hpc.common.locks import filesystem_of
from primerl_hpc.plan.plan import SumsPlan
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.access.private_tmp import PrivateTmp
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.job.no_proxy import no_proxy_variables
from tests.support.helpers import PATIENCE_S, ROOT

HERE = platform.machine()
OTHER = {"x86_64": (183, "aarch64"), "aarch64": (62, "x86_64")}[platform.machine()]


def on_node(**wants: Any) -> Subject:
    return Subject(Where.NODE, {"gpus": 0, **wants})


def test_an_interpreter_of_another_architecture_is_bad(tmp_path: Path) -> None:
    machine, name = OTHER
    foreign = tmp_path / "python"
    foreign.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(11) + machine.to_bytes(2, "little"))
    assert elf_arch(str(foreign)) == name and elf_arch(sys.executable) == platform.machine()
    (found,) = architecture(on_node(pythons=[sys.executable, str(foreign)]))
    assert found.level == "bad" and f"{foreign} is built for {name}" in found.message
    assert [each.level for each in architecture(on_node(arch=name, pythons=[]))] == ["bad"]
    assert list(architecture(on_node(arch=HERE, pythons=[sys.executable]))) == [ok(HERE)]


@pytest.mark.parametrize(("built_for", "level"), [(HERE, "ok"), (OTHER[1], "bad")])
def test_a_login_node_compares_the_interpreter_of_the_supervisor_with_the_nodes(
    built_for: str, level: str
) -> None:
    profile = Profile.model_validate({"name": "p", "nodes": 2, "node": {"arch": built_for}})
    (found,) = (finding for finding in examine(profile, lambda _: "") if finding.check == "architecture")
    assert found.level == level and f"nodes are {built_for}, this machine is {HERE}" in found.message


@pytest.mark.parametrize(
    ("body", "level", "words"),
    [
        ('shift 2; exec "$@"', "ok", "starts in nersc/pytorch:24.06"),
        (
            'echo "exec /opt/python: exec format error" >&2; exit 1',
            "bad",
            f"nersc/pytorch:24.06 is built for another architecture than this node ({platform.machine()})",
        ),
        ('echo "shifter: no image found" >&2; exit 1', "warn", "no image found"),
    ],
)
def test_the_interpreter_is_started_in_each_container(
    tmp_path: Path, body: str, level: str, words: str
) -> None:
    """shifter does not show the architecture of an image before it starts."""
    shifter = tmp_path / "shifter"
    shifter.write_text(f"#!/bin/sh\n{body}\n")
    shifter.chmod(0o755)
    command = [str(shifter), "--volume=/r:/r", "nersc/pytorch:24.06", sys.executable]
    (found,) = containers(on_node(containers=[command]))
    assert found.level == level and words in found.message
    (missing,) = containers(on_node(containers=[["/no/shifter", "image", "python"]]))
    assert missing.level == "bad" and "/no/shifter is not installed" in missing.message


def test_the_preflight_knows_the_containers_of_a_plan() -> None:
    software = {"default": {"python": "/opt/python", "container": {"kind": "shifter", "image": "nersc/x"}}}
    profile = Profile.model_validate({"name": "p", "nodes": 2, "software": software})
    plan = compile_plan(load_recipe("reverse_text/tiny").recipe, profile, run_dir="/r", python="/py")
    assert plan.preflight is not None
    assert plan.preflight.containers == (("shifter", "--volume=/r:/r", "--image=nersc/x", "/opt/python"),)


def test_a_missing_network_plugin_is_bad_and_one_in_the_library_path_is_found(tmp_path: Path) -> None:
    subject = on_node(plugin="rccl", plugin_env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert [each.level for each in network_plugin(subject)] == ["bad"]
    (tmp_path / "librccl-net.so").touch()
    assert list(network_plugin(subject)) == [ok(str(tmp_path / "librccl-net.so"))]
    assert list(network_plugin(on_node(plugin="none"))) == []


def test_the_filesystem_of_a_folder_is_that_of_the_deepest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_bytes(
        b"/dev/sda / ext4 rw 0 0\nnas:/x /home nfs4 rw 0 0\ntmpfs /home/a\\040b tmpfs rw 0 0\nusb /\xff vfat rw 0 0\n"
    )
    found = {path: filesystem_of(Path(path), str(mounts)) for path in ("/homes", "/home/c", "/home/a b/d")}
    assert found == {"/homes": "ext4", "/home/c": "nfs4", "/home/a b/d": "tmpfs"}
    assert filesystem_of(tmp_path, str(tmp_path / "missing")) == ""


def test_a_scratch_folder_in_memory_is_not_a_disk() -> None:
    if filesystem_of(Path("/dev/shm")) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    (disk,) = check_scratch("/dev/shm", 0, "disk")
    assert disk.level == "bad" and "in memory (tmpfs)" in disk.message
    assert [each.level for each in check_scratch("/dev/shm", 0, "ram")] == ["ok"]
    unknown, _ = check_scratch("/dev/shm", 0)
    assert unknown.level == "warn" and "may count as memory of the job" in unknown.message


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("$NOT_SET_HERE/x", "NOT_SET_HERE is not set"),
        ("/proc/nowhere", "/proc/nowhere does not exist and cannot be created"),
        ("/proc", "/proc is not writable"),
    ],
)
def test_a_scratch_folder_that_is_missing_is_bad(folder: str, words: str) -> None:
    (found,) = check_scratch(folder, 0)
    assert found.level == "bad" and words in found.message


def test_a_scratch_folder_smaller_than_in_the_profile_is_reported(tmp_path: Path) -> None:
    found = [each.message for each in check_scratch(str(tmp_path), 0, None, 1e9) if each.level == "warn"]
    assert any("1e+09 in the profile" in message for message in found)


def test_a_scratch_folder_in_which_sockets_of_engines_have_too_long_paths_is_reported(tmp_path: Path) -> None:
    root = Path(tempfile.mkdtemp(dir="/tmp", prefix="s"))
    try:
        fits = root / ("x" * (LONGEST_SCRATCH - len(str(root)) - 1))
        too_long = root / ("x" * (LONGEST_SCRATCH - len(str(root))))
        assert [each.level for each in check_scratch(str(fits), 0)] == ["ok"]
        assert [each.level for each in check_scratch(str(too_long), 0)] == ["warn", "ok"]
        name = run_keys(RunDir(tmp_path / "run"), 1).temporary_name
        environ = {"PRIMERL_PRIVATE_TMP": name, "PRIMERL_SCRATCH": str(fits)}
        tmp = PrivateTmp.create(environ | {"SLURM_JOB_ID": "1234567890"})
        assert tmp is not None
        assert len(str(tmp.folder / str(uuid.uuid4()))) <= 107
        tmp.release()
    finally:
        shutil.rmtree(root)


def test_gpus_of_amd_are_counted(tmp_path: Path) -> None:
    assert count_amd_gpus(tmp_path) is None
    for index, simd in enumerate((0, 440, 440)):
        (tmp_path / str(index)).mkdir()
        (tmp_path / str(index) / "properties").write_text(f"cpu_cores_count 0\nsimd_count {simd}\n")
    assert count_amd_gpus(tmp_path) == 2
    assert [judge_count(found, 2).level for found in (None, 1, 2)] == ["bad", "bad", "ok"]


# -- the proxy


def test_the_runs_own_hosts_are_not_reached_through_a_proxy() -> None:
    environ = {"HTTPS_PROXY": "http://proxy:3128", "no_proxy": ".site"}
    found = no_proxy_variables(environ, None, ["n1", "n2"], ["10.0.0.1"])
    assert found["no_proxy"] == found["NO_PROXY"] == ".site,localhost,127.0.0.1,::1,n1,n2,10.0.0.1"
    assert no_proxy_variables({}, None, ["n1"], []) == {}
    assert "n1" in no_proxy_variables({}, (".internal",), ["n1"], [])["no_proxy"]


def test_a_proxy_that_is_down_is_reported() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        (found,) = proxy(on_node(proxy=address))
        assert found.level == "warn" and f"the proxy {address} cannot be reached" in found.message
        listener.listen()
        assert [each.level for each in proxy(on_node(proxy=address))] == ["ok"]
    assert list(proxy(on_node(proxy=None))) == []


# -- scratch


def test_the_folder_of_a_job_is_in_the_scratch_folder_with_the_jobs_id(tmp_path: Path) -> None:
    environ = {
        "PRIMERL_PRIVATE_TMP": ".pabc",
        "PRIMERL_SCRATCH": "$DISK/me",
        "DISK": str(tmp_path),
        "SLURM_JOB_ID": "7",
    }
    environ["TRITON_CACHE_DIR"] = "/mine"
    tmp = PrivateTmp.create(environ)
    assert tmp is not None and tmp.folder == tmp_path / "me" / ".pabc-7"
    assert environ["TMPDIR"] == str(tmp.folder) and environ["TRITON_CACHE_DIR"] == "/mine"
    assert (
        environ["VLLM_CACHE_ROOT"] == str(tmp.folder / "vllm") and tmp.folder.stat().st_mode & 0o777 == 0o700
    )
    tmp.release()
    assert not tmp.folder.exists()


def test_a_scratch_folder_whose_variable_is_not_set_is_an_error() -> None:
    with pytest.raises(OSError, match="NO_SUCH_DISK is not set"):
        PrivateTmp.create({"PRIMERL_PRIVATE_TMP": ".pabc", "PRIMERL_SCRATCH": "$NO_SUCH_DISK"})


# -- sums


def result(**changes: Any) -> dict[str, Any]:
    return {"node": "n1", "ranks": 2, "wrong": [], "error": "", "seconds": 1.0, **changes}


@pytest.mark.parametrize(
    ("results", "level", "words"),
    [
        ([result(), result(node="n2")], "ok", "sums over 2 ranks on 2 nodes are right"),
        ([result(), result(node="n2", wrong=["3 of 8 elements"])], "bad", "wrong sums on n2: 3 of 8"),
        ([result(error="a rank exited with 1"), None], "warn", "n1: a rank exited with 1"),
        ([result(), None], "warn", "1 of 2 nodes did not respond"),
    ],
)
def test_sums_of_all_nodes_are_judged_together(results: list[Any], level: str, words: str) -> None:
    found = judge_sums(results)
    assert found.level == level and words in found.message


def test_two_nodes_sum_over_gloo_and_a_wrong_sum_of_one_rank_is_found(tmp_path: Path) -> None:
    """Rank 1 corrupts an element of its result; rank 0 does not."""
    request = tmp_path / "sums.json"
    wants = SumsPlan(argv=(), nodes=(0, 1), accelerator="cpu", ranks_per_node=1, timeout_s=100)
    write_json(request, make_request(wants, nonce="n"))
    (tmp_path / "sitecustomize.py").write_text(CORRUPT)
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = os.environ | {"SLURM_NTASKS": "2", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    command = [sys.executable, "-m", "primerl_hpc.checks.sums", str(request)]
    tasks = [subprocess.Popen(command, env=environ | {"SLURM_PROCID": str(node)}) for node in range(2)]
    assert [task.wait(timeout=PATIENCE_S) for task in tasks] == [0, 0]
    right, wrong = (read_json(result_file(request, node)) for node in range(2))
    assert judge_sums([right, right]).is_ok and not right["error"], right
    assert (
        judge_sums([right, wrong]).level == "bad" and "1 of 256 elements (rank 1 of 2)" in wrong["wrong"][0]
    )


CORRUPT = """
import os, sys
if sys.orig_argv[-1] == "1" and os.environ["SLURM_PROCID"] == "1":
    import torch.distributed as dist
    original = dist.all_reduce

    def all_reduce(tensor, *arguments, **options):
        result = original(tensor, *arguments, **options)
        tensor[-1] += 1
        return result

    dist.all_reduce = all_reduce
"""
