"""Checks before submission against the site: login host, architecture of interpreters and images, purged folders."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.checks.images import sif_arch, squashfs_arch
from primerl_hpc.checks.site import check_site, find_module, modules
from primerl_hpc.checks.table import Subject, Where
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.slurm.sbatch import PassedVariables, submission_environ

HERE = platform.machine()
OTHER = {"x86_64": "aarch64", "aarch64": "x86_64"}[HERE]
SIF = {"x86_64": b"02", "aarch64": b"04"}


def check(run_dir: str = "/r", **values: Any) -> list[str]:
    profile = Profile.model_validate({"name": "p", "nodes": 2, **values})
    recipe = load_recipe("reverse_text/tiny").recipe
    return check_site(compile_plan(recipe, profile, run_dir=run_dir, python=sys.executable), profile)


def image(path: Path, arch: str) -> Path:
    path.write_bytes(
        b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0" + b"01\0" + SIF[arch] + b"\0"
    )
    return path


def test_jobs_are_submitted_from_the_login_nodes_of_the_profile() -> None:
    assert check(login={"hosts": ["*"]}) == []
    with pytest.raises(ConfigError, match=r"cannot be submitted from .* log in to trig-login\*"):
        check(login={"hosts": ["trig-login*"]})


def test_an_interpreter_of_another_architecture_is_refused_before_the_queue() -> None:
    assert check(node={"arch": HERE}) == []
    with pytest.raises(ConfigError, match=f"is built for {HERE}, but the nodes of profile 'p' are {OTHER}"):
        check(node={"arch": OTHER})


def test_an_image_of_another_architecture_is_refused_before_the_queue(tmp_path: Path) -> None:
    for arch in (HERE, OTHER):
        path = image(tmp_path / f"{arch}.sif", arch)
        assert sif_arch(str(path)) == arch
        software = {"default": {"container": {"kind": "apptainer", "image": str(path)}}}
        if arch == HERE:
            assert check(node={"arch": HERE}, software=software) == []
        else:
            with pytest.raises(ConfigError, match=f"{path} is built for {OTHER}"):
                check(node={"arch": HERE}, software=software)
    assert sif_arch("docker://some/image") is None


@pytest.mark.skipif(shutil.which("mksquashfs") is None, reason="needs squashfs-tools")
def test_a_squashfs_image_of_another_architecture_is_refused_before_the_queue(tmp_path: Path) -> None:
    machines = {"x86_64": 62, "aarch64": 183}
    for arch in (HERE, OTHER):
        program = tmp_path / arch / "usr" / "bin" / "bash"
        program.parent.mkdir(parents=True)
        header = b"\x7fELF\x02\x01\x01" + bytes(11) + machines[arch].to_bytes(2, "little")
        program.write_bytes(header + bytes(1 << 20))
        path = tmp_path / f"{arch}.sqsh"
        subprocess.run(["mksquashfs", program.parents[2], path, "-quiet", "-no-progress"], check=True)
        assert squashfs_arch(str(path)) == arch
        software = {"default": {"container": {"kind": "pyxis", "image": str(path)}}}
        if arch == HERE:
            assert check(node={"arch": HERE}, software=software) == []
        else:
            with pytest.raises(ConfigError, match=f"{path} is built for {OTHER}"):
                check(node={"arch": HERE}, software=software)
    (tmp_path / "other.sqsh").write_bytes(b"no image")
    assert squashfs_arch(str(tmp_path / "other.sqsh")) is None and squashfs_arch("nvcr.io#some/image") is None


def refused_for(container: dict[str, str], arch: str) -> bool:
    """True if a profile with nodes of this architecture refuses the container's image for its architecture."""
    try:
        check(node={"arch": arch}, software={"default": {"container": container}})
    except ConfigError as error:
        return f"{container['image']} is built for" in str(error)
    return False


@pytest.mark.parametrize(
    ("label", "built_for"),
    [
        ("prgenv-gnu/24.11:v2@todi%gh200", "aarch64"),
        ("pytorch/v2.6.0:v1@balfrin%a100", "x86_64"),
        ("prgenv-gnu/24.11:v2", None),
    ],
)
def test_a_uenv_for_nodes_of_another_architecture_is_refused(label: str, built_for: str | None) -> None:
    for arch in ("x86_64", "aarch64"):
        assert refused_for({"kind": "uenv", "image": label}, arch) == (built_for not in (None, arch))


def test_an_image_of_another_architecture_in_the_store_of_podman_is_refused(tmp_path: Path) -> None:
    podman = tmp_path / "podman-hpc"
    podman.write_text(
        '#!/bin/sh\n[ "$1 $2 $3 $4" = "image inspect --format {{.Architecture}}" ] || exit 2\n'
        'case "$5" in arm) echo arm64;; intel) echo amd64;; *) echo "Error: $5: image not known" >&2; exit 125;; esac\n'
    )
    podman.chmod(0o755)
    for image, built_for in {"arm": "aarch64", "intel": "x86_64", "unknown": None}.items():
        container = {"kind": "podman-hpc", "image": image, "command": str(podman)}
        for arch in ("x86_64", "aarch64"):
            assert refused_for(container, arch) == (built_for not in (None, arch))
    assert not refused_for({"kind": "podman-hpc", "image": "arm", "command": "/no/podman"}, "x86_64")


@pytest.mark.skipif(shutil.which("mksquashfs") is None, reason="needs squashfs-tools")
def test_the_image_of_an_edf_file_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "root" / "usr" / "bin" / "bash"
    program.parent.mkdir(parents=True)
    program.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(11) + (183).to_bytes(2, "little") + bytes(1 << 10))
    image_file = tmp_path / "image.sqsh"
    subprocess.run(["mksquashfs", tmp_path / "root", image_file, "-quiet", "-no-progress"], check=True)
    edf = tmp_path / "edf" / "torch.toml"
    edf.parent.mkdir()
    edf.write_text('image = "${IMAGES}/image.sqsh"\nmounts = []\n')
    monkeypatch.setenv("IMAGES", str(tmp_path))
    monkeypatch.setenv("EDF_PATH", f"/nowhere:{edf.parent}")
    for name in ("torch", str(edf)):
        container = {"kind": "container-engine", "image": name}
        assert refused_for(container, "x86_64") and not refused_for(container, "aarch64")
    assert not refused_for({"kind": "container-engine", "image": "missing"}, "x86_64")


def test_a_run_directory_in_a_purged_folder_is_a_warning(tmp_path: Path) -> None:
    storage = {"scratch": {"path": str(tmp_path), "purge_days": 14}}
    (warning,) = check(f"{tmp_path}/run", storage=storage)
    assert "deletes after 14 days" in warning
    assert check("/elsewhere/run", storage=storage) == []


def test_variables_of_the_submitting_shell_are_a_choice_of_the_profile() -> None:
    listed = {"PATH": "/bin", "BASH_ENV": "/m", "CONDA_PREFIX": "/c", "LC_ALL": "C"}
    shell = listed | {"MY_SITE_NAME": "n", "MY_SITE_TOKEN": "x", "EDITOR": "vi"}
    assert submission_environ(shell, ()) == listed
    assert "BASH_ENV" not in submission_environ(shell, (), PassedVariables(drop=("BASH_ENV",)))
    kept = submission_environ(shell, (), PassedVariables(keep=("MY_SITE_*",)))
    assert kept == listed | {"MY_SITE_NAME": "n"}, "no secret passes by a pattern"
    kept = submission_environ(shell, (), PassedVariables(keep=("MY_SITE_TOKEN",)))
    assert kept == listed | {"MY_SITE_TOKEN": "x"}


def test_variables_that_processes_read_are_passed_in_any_case() -> None:
    profile = Profile.model_validate(
        {
            "name": "p",
            "nodes": 2,
            "scheduler": {"submit_env": {"keep": ["CONDA_*"]}},
            "env": {"T": {"from": "HF_TOKEN"}},
            "software": {"setup": ["source $MY_STACK/env.sh"]},
        }
    )
    tracking = ["tracking={wandb: {}, prime: {key_variable: MY_PRIME_KEY}}"]
    recipe = load_recipe("reverse_text/tiny", overrides=tracking).recipe
    plan = compile_plan(recipe, profile, run_dir="/r", python="/py")
    assert plan.submit_keep == ("CONDA_*", "HF_TOKEN", "MY_PRIME_KEY", "MY_STACK", "WANDB_API_KEY")


MODULE_COMMAND = """module() {
    case "$1 $2" in
        "load gcc/15") GCC=1 ;;
        "is-avail gcc/15") return 0 ;;
        "is-avail cuda/12") [ -n "$GCC" ] ;;
        *) return 1 ;;
    esac
}
"""


def test_a_module_of_a_hierarchy_is_available_after_those_that_are_loaded_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".bash_profile").write_text(MODULE_COMMAND)
    monkeypatch.setenv("HOME", str(tmp_path))
    profile = Profile.model_validate({"name": "p", "software": {"modules": ["gcc/15", "cuda/12", "nccl"]}})
    subject = Subject(Where.LOGIN, {}, own_profile=profile)
    found = {finding.check: finding.is_ok for finding in modules(subject)}
    assert found == {"module gcc/15": True, "module cuda/12": True, "module nccl": False}
    assert find_module("cuda/12", []) is False
