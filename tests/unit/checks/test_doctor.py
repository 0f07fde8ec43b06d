"""`doctor`: comparison of sinfo's output with the profile (tests/slurm covers the rest with a real SLURM)."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.checks.doctor import examine
from primerl_hpc.checks.gpus import judge_driver, missing_torch, torch_cuda
from primerl_hpc.checks.quotas import parse_quota, quotas_of
from primerl_hpc.cluster.load import load_profile
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.cluster.software_schema import RoleSoftware
from primerl_hpc.common.errors import ExitCode, SchedulerError
from primerl_hpc.slurm.jobs import SEPARATOR
from primerl_hpc.slurm.refusals import REFUSALS, Refusal


@pytest.fixture(autouse=True)
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sbatch", "srun", "squeue", "scancel", "scontrol"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.parametrize(
    "limits, is_good, said",
    [
        (("1:00:00", "1-00:00:00"), True, "of at most 1-00:00:00"),
        (("8:00:00", "1:00:00"), False, "of at most 8:00:00"),
        (("infinite", "1:00:00"), None, ""),
    ],
)
def test_a_walltime_is_valid_if_one_of_several_partitions_allows_it(
    limits: tuple[str, ...], is_good: bool | None, said: str
) -> None:
    names = ["gpu", "long"]
    rows = [
        SEPARATOR.join([name, "up", limit, "4", "gpu:8", "64", "512000+"])
        for name, limit in zip(names, limits, strict=True)
    ]
    scheduler = {"partition": ",".join(names), "time": "12:00:00"}
    profile = Profile.model_validate({"name": "site", "nodes": 2, "scheduler": scheduler})
    asked = lambda command: "\n".join(rows) if "--format" in command[-1] else ""  # noqa: E731
    found = [each for each in examine(profile, asked) if each.check == "walltime"]
    assert [each.is_ok for each in found] == ([] if is_good is None else [is_good])
    assert all(said in each.message for each in found)


def test_a_walltime_that_is_too_long_names_the_partition_that_admits_it() -> None:
    names = {"gpu": ("8:00:00", "gpu:8"), "cpu": ("infinite", "(null)"), "long": ("7-00:00:00", "gpu:h100:8")}
    rows = [
        SEPARATOR.join([name, "up", limit, "4", gres, "64", "512000"])
        for name, (limit, gres) in names.items()
    ]
    values = {"name": "site", "nodes": 2, "node": {"gpus": 8, "cores": 64}}
    profile = Profile.model_validate(values | {"scheduler": {"partition": "gpu", "time": "12:00:00"}})
    (found,) = [
        each
        for each in examine(profile, lambda command: "\n".join(rows) if "--format" in command[-1] else "")
        if each.check == "walltime"
    ]
    assert found.hint == "lower scheduler.time to 8:00:00, or use long, which admits it (scheduler.partition)"


def test_notes_of_a_profile_about_its_site_are_printed_first() -> None:
    profile = load_profile("lumi").profile
    first = next(iter(examine(profile, lambda command: "")))
    assert first.is_ok and first.check == "profile"
    for word in (
        "8 × MI250X-GCD, 64 GiB each",
        "480 GiB",
        "verified: never on the machine",
        profile.docs_url,
    ):
        assert word in first.message


def test_a_site_that_hides_its_partitions_is_checked_by_a_test_submission(tmp_path: Path) -> None:
    """SLURM is configured with PrivateData=partitions."""
    sbatch = "echo 'sbatch: Job 7 to start at 2026-11-24T06:00:00 using 1 processors on nodes n1 in partition gpu' >&2"
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\n{sbatch}\n")

    def asked(command: list[str]) -> str:
        if command[0] == "sinfo" and "--version" not in command:
            raise SchedulerError("sinfo: slurm_load_partitions: Access/permission denied")
        return "slurm 22.05.8"

    scheduler = {"partition": "gpu", "time": "12:00:00"}
    profile = Profile.model_validate({"name": "site", "runs_dir": str(tmp_path), "scheduler": scheduler})
    found = {each.check: each for each in examine(profile, asked)}
    assert found["partition"].is_ok and "does not show its partitions" in found["partition"].message
    assert found["test submission"].is_ok and "controller" not in found


def test_a_rejection_by_the_sites_own_rules_is_shown_complete(tmp_path: Path) -> None:
    lines = [f"sbatch: error: rule {number}" for number in range(5)]
    words = "\\n".join([*lines, "sbatch: error: Batch job submission failed: Unspecified error"])
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\nprintf '{words}\\n' >&2\nexit 1\n")
    profile = Profile.model_validate({"name": "site", "runs_dir": str(tmp_path), "scheduler": {"time": 60}})
    found = {each.check: each for each in examine(profile, lambda command: "")}["test submission"]
    assert not found.is_ok and all(f"rule {number}" in found.details for number in range(5))


def test_facts_of_the_site_that_do_not_hold_here_are_reported(tmp_path: Path) -> None:
    row = SEPARATOR.join(["gpu", "up", "infinite", "4", "gpu:8", "64", "512000+"])
    values = {
        "name": "site",
        "runs_dir": str(tmp_path),
        "scheduler": {"partition": "gpu"},
        "node": {"memory_gib": 512},
        "storage": {
            "scratch": {"path": str(tmp_path), "purge_days": 14},
            "work": {"path": "/no/such/folder"},
        },
        "login": {"hosts": ["login*.site"]},
        "variants": {"debug": {"nodes": 1}},
    }
    found = {
        each.check: each
        for each in examine(
            Profile.model_validate(values),
            lambda command: row if "--format" in command[-1] else "slurm 23.02",
        )
    }
    assert not found["login host"].is_ok and "login*.site" in found["login host"].hint
    assert found["storage scratch"].is_ok and "after 14 days" in found["storage scratch"].message
    assert not found["storage work"].is_ok and "does not exist" in found["storage work"].message
    assert (
        not found["memory of a node"].is_ok
        and "lower node.memory_gib to 500" in found["memory of a node"].hint
    )
    assert found["variants"].message == "--variant debug"


def test_doctor_reports_versions_limits_space_and_tokens_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-value")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no" / "hub"))
    monkeypatch.setenv("PRIMERL_RUNS_DIR", str(tmp_path / "runs"))
    results = {result.check: result for result in examine(load_profile("local").profile)}
    names = ("profile", "run directory", "scheduler")
    names += ("versions", "GPU driver", "limits", "free files", "quota", "hub cache", "tokens")
    assert tuple(results) == names and all(result.is_ok for result in results.values())
    assert results["versions"].is_ok and "torch 2" in results["versions"].message
    assert "open files" in results["limits"].message and "/dev/shm" in results["limits"].message
    assert "GiB" in results["hub cache"].message
    assert "set: WANDB_API_KEY" in results["tokens"].message and "secret" not in results["tokens"].message
    old = tmp_path / "site" / "transformers-4.1.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.1\n")
    monkeypatch.syspath_prepend(old.parent)
    (wrong,) = (found for found in examine(load_profile("local").profile) if found.check == "versions")
    assert not wrong.is_ok and "transformers 4.1 instead of >=5" in re.sub(r"<5\.\d+,", "", wrong.message)


@pytest.mark.parametrize(
    "cuda, wanted, is_good",
    [(12040, "12.8", True), (13000, "12.8", True), (12090, "13.0", False), (12040, None, True)],
)
def test_a_driver_runs_the_cuda_of_its_own_and_earlier_major_versions(
    cuda: int, wanted: str | None, is_good: bool
) -> None:
    found = judge_driver(("550.54.15", cuda), wanted)
    assert found.is_ok is is_good and f"550.54.15, CUDA {cuda // 1000}." in found.message
    assert wanted is None or f"torch was built for CUDA {wanted}" in found.message
    assert judge_driver("no NVIDIA driver on this machine", wanted).is_ok


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "the trainer of this profile needs it"),
        ({"python": "/opt/train/bin/python"}, "need not be"),
        ({"container": {"kind": "pyxis", "image": "/images/train.sqsh"}}, "need not be"),
    ],
)
def test_without_torch_on_a_login_node_doctor_reports_if_the_trainer_needs_it(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], expected: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert expected in missing_torch(RoleSoftware.model_validate(values))


def test_the_cuda_version_of_torch_is_read_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('slow')")
    (tmp_path / "torch" / "version.py").write_text(
        "__version__ = '2.9'\ncuda: Optional[str] = '12.8'\nhip = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert torch_cuda() == "12.8"


LFS = """     /lustre/a-long-name-of-a-file-system
                 900*     800    1000      6d  88000   90000  100000       -
"""
QUOTA = """Disk quotas for user alice (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
      /dev/other      1      0      2      0      1      0      0      0
 {device}  2097152  0  4194304  0  95  0  100  0
"""


def test_quotas_are_read_from_the_reports_of_lfs_and_quota() -> None:
    broken = parse_quota(LFS, "user alice", "/lustre/a-long-name-of-a-file-system")
    assert broken is not None and broken.share == 900 / 800
    assert (broken.used_files, broken.limit_files) == (88000, 90000)
    assert parse_quota(LFS, "user alice", "/home") is None and parse_quota("", "user alice", "/") is None
    root = next(
        line.split()[0] for line in Path("/proc/self/mounts").read_text().splitlines() if " / " in line
    )
    found = parse_quota(QUOTA.format(device=root), "user alice", "/")
    assert found is not None and found.describe() == "user alice: 2 of 4 GiB, 95 of 100 files"


@pytest.mark.parametrize(
    "files, is_good, said", [(40, True, "40 of 100"), (95, True, "more than 90%"), (100, False, "limit")]
)
def test_an_exhausted_quota_of_the_runs_folder_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, is_good: bool, said: str
) -> None:
    """``quota`` prints the report of a machine with quotas, for the filesystem of the folder."""
    mount = next(str(path) for path in (tmp_path, *tmp_path.parents) if path.is_mount())
    script = f"#!/bin/sh\n[ $3 = -u ] && echo '{mount} 20480 0 0 0 {files} 0 100 0'\nexit 1\n"
    (tmp_path / "quota").write_text(script)
    (tmp_path / "quota").chmod(0o755)
    monkeypatch.setenv("PRIMERL_RUNS_DIR", str(tmp_path / "runs"))
    (quota,) = quotas_of(tmp_path)
    assert quota.holder.startswith("user ")
    (result,) = (found for found in examine(load_profile("local").profile) if found.check == "quota")
    assert result.is_ok is is_good and said in result.message
    assert is_good or "primerl-hpc du" in result.hint


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["--mismatch", "{folder}/none"], ExitCode.NOT_FOUND, "none does not exist"),
        (["--mismatch", "{folder}/empty"], ExitCode.DATA, "has no config.json"),
        (["--mismatch", "{folder}/bare"], ExitCode.DATA, "has no weights"),
        (["--mismatch", "{folder}/fp8"], ExitCode.CONFIG, "is quantized (fp8)"),
        (["--mismatch", "{folder}/bare", "--nodes", "2"], ExitCode.USAGE, "--nodes checks a profile"),
        (["--mismatch", "{folder}/bare", "--dtype", "int8"], ExitCode.USAGE, "'int8' is not one of"),
        (["--dtype", "float16"], ExitCode.USAGE, "--dtype belongs to --mismatch"),
    ],
)
def test_a_model_that_cannot_be_measured_is_refused_in_a_sentence(
    tmp_path: Path, arguments: list[str], code: ExitCode, said: str
) -> None:
    for name, config in {
        "empty": None,
        "bare": {},
        "fp8": {"quantization_config": {"quant_method": "fp8"}},
    }.items():
        (tmp_path / name).mkdir()
        if config is not None:
            (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    (tmp_path / "fp8" / "model.safetensors").touch()
    words = [word.format(folder=tmp_path) for word in arguments]
    done = subprocess.run(
        [sys.executable, "-m", "primerl_hpc", "doctor", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == code and said in done.stderr, done.stderr


def test_layers_with_state_are_measured_in_bfloat16_on_cpus(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from primerl_hpc.roles.mismatch import data_types

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for family, dtypes in {"qwen3_next": ("bfloat16",), "qwen3": ("bfloat16", "float16", "float32")}.items():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        assert data_types(str(tmp_path))["dtypes"] == dtypes


@pytest.mark.parametrize(
    ("scheduler", "node", "site", "what", "hint"),
    [
        ({"gpu_type": "h100"}, {"gpus": 8}, ["gpu:h100:8(S:0-1)"], "GPU type", None),
        ({"gpu_type": "H100"}, {"gpus": 8}, ["gpu:h100:8"], "GPU type", None),
        (
            {"gpu_type": "a100"},
            {"gpus": 8},
            ["gpu:h100:8"],
            "GPU type",
            "scheduler.gpu_type: name one of h100",
        ),
        ({"gpu_type": "h100"}, {"gpus": 8}, ["gpu:8"], "GPU type", "scheduler.gpu_type: name no type"),
        ({"gpu_type": "h100"}, {"gpus": 8}, ["gpu:h100:4", "gpu:a100:8"], "GPU type", "at most 4 of h100"),
        (
            {"gres": ["gpu:a100:4", "nvme:1"]},
            {},
            ["gpu:h100:8"],
            "GPU type",
            "scheduler.gres: name one of h100",
        ),
        (
            {"gpu_type": "a100", "gpu_request": "gpus-per-node"},
            {"gpus": 4},
            ["gpu:h100:8"],
            "GPU type",
            "name one of h100",
        ),
        ({"memory": "900G"}, {}, ["gpu:8"], "requested memory", "lower scheduler.memory to 500G or less"),
        ({"memory": "500G"}, {}, ["gpu:8"], "requested memory", None),
        (
            {"memory_per_gpu": "100G"},
            {"gpus": 8},
            ["gpu:8"],
            "requested memory",
            "lower scheduler.memory_per_gpu,",
        ),
        ({"memory_per_cpu": "8000M"}, {"cores": 64}, ["gpu:8"], "requested memory", None),
    ],
)
def test_gpu_type_and_memory_of_a_request_are_compared_with_the_nodes(
    scheduler: dict[str, object], node: dict[str, int], site: list[str], what: str, hint: str | None
) -> None:
    rows = [SEPARATOR.join(["gpu", "up", "infinite", "4", gres, "64", "512000"]) for gres in site]
    values = {"name": "site", "nodes": 2, "node": node, "scheduler": {"partition": "gpu", **scheduler}}
    asked = lambda command: "\n".join(rows) if "--format" in command[-1] else ""  # noqa: E731
    (found,) = [result for result in examine(Profile.model_validate(values), asked) if result.check == what]
    assert found.is_ok == (hint is None), found
    assert hint is None or hint in found.hint


def test_the_keys_of_a_node_type_are_named_in_hints_about_it() -> None:
    row = SEPARATOR.join(["gpu", "up", "infinite", "4", "gpu:h100:8", "64", "512000"])
    other = {"nodes": 1, "gpus": 8, "gpu_type": "a100", "memory": "900G"}
    values = {"name": "site", "nodes": 2, "scheduler": {"partition": "gpu"}, "node_types": {"big": other}}
    asked = lambda command: row if "--format" in command[-1] else ""  # noqa: E731
    found = {result.check: result for result in examine(Profile.model_validate(values), asked)}
    assert "node_types.big.gpu_type" in found["big GPU type"].hint
    assert "node_types.big.memory to 500G" in found["big requested memory"].hint


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.cause[:30])
def test_no_hint_of_doctor_names_doctor(tmp_path: Path, refusal: Refusal) -> None:
    printed = re.sub(r"\|.*|[()\\]", "", refusal.pattern)
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho 'sbatch: error: {printed}' >&2\nexit 1\n")
    profile = Profile.model_validate({"name": "site", "runs_dir": str(tmp_path), "scheduler": {"time": 60}})
    found = {result.check: result for result in examine(profile, lambda command: "")}["test submission"]
    assert not found.is_ok and "primerl-hpc doctor" not in found.hint
