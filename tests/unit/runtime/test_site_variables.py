"""Variables that a site or a home folder sets for everyone, and that must not reach, or end, the processes of a run."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from primerl_hpc.common import env, package
from primerl_hpc.common.names import Role
from primerl_hpc.render.bundle import shell_folder
from primerl_hpc.run.access.private_tmp import PrivateTmp, delete_abandoned
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.step import Launch
from primerl_hpc.runtime.steps.srun import environ_of_job
from tests.support.helpers import ROOT, process_plan, unusable_sft_recipe


def launch(tmp_path: Path, **changes: object) -> Launch:
    return Launch(process_plan(Role.TRAINER, **changes), RunDir(tmp_path), "main", 1, 0)


# -- numbers


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, 1), ("", 1), (" ", 1), ("4,2", 4), ("8", 8), ("0", 1), ("many", 1), ("-3", 1)],
)
def test_the_number_of_threads_is_read_as_sites_write_it(
    given: str | None, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert env.num_threads() == expected
    passed = {**os.environ, **launch(tmp_path).environment}.get("OMP_NUM_THREADS")
    assert passed is None or passed.isdecimal(), "libraries of the process parse it as one number"


def test_a_planned_number_of_threads_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert launch(tmp_path, env={"OMP_NUM_THREADS": "3"}).environment["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(("text", "expected"), [("2(x3)", 2), ("", 7), ("x", 7), ("12", 12)])
def test_numbers_of_slurm_are_read_as_slurm_writes_them(text: str, expected: int) -> None:
    assert env.integer("SLURM_NTASKS", 7, {"SLURM_NTASKS": text}) == expected


# -- packages in the home folder


def test_packages_in_the_home_folder_do_not_reach_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path))
    folder = Path(
        subprocess.check_output([sys.executable, "-m", "site", "--user-site"], text=True).strip()
        if sys.prefix == sys.base_prefix
        else tmp_path / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    )
    folder.mkdir(parents=True)
    (folder / "of_months_ago.py").write_text("")
    base = Path(sys.base_prefix) / "bin" / "python3"  # a virtual environment has no such folder
    code = "import importlib.util as u; print(u.find_spec('of_months_ago') is not None)"
    found = {
        name: subprocess.check_output([base, "-c", code], env={**os.environ, **variables}, text=True).strip()
        for name, variables in (("login node", {}), ("process", launch(tmp_path).environment))
    }
    assert found == {"login node": "True", "process": "False"}


def test_a_package_that_is_installed_in_the_home_folder_is_still_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(package.package_folder().parent))
    assert "PYTHONNOUSERSITE" not in launch(tmp_path).environment


# -- variables of images


def test_planned_variables_replace_those_of_an_apptainer_image(tmp_path: Path) -> None:
    argv = ("/usr/bin/apptainer", "exec", "img.sif", "/py", "-m", "primerl_hpc.roles.trainer")
    environment = launch(tmp_path, argv=argv, container="command", env={"HF_HOME": "/hf"}).environment
    assert environment["APPTAINERENV_HF_HOME"] == "/hf" and environment["APPTAINERENV_PYTHONUTF8"] == "1"
    assert not any(name.startswith("APPTAINERENV") for name in launch(tmp_path).environment)


# -- requests of the job


JOB = {
    **{
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_ID_HET_GROUP_0": "1",
        "SLURM_HET_SIZE": "2",
    },
    **{"SLURM_CONF": "/etc/slurm.conf", "SLURM_NETWORK": "disable_rdzv_get", "SLURM_HINT": "nomultithread"},
    **{"SLURM_CLUSTER_NAME": "c", "SRUN_DEBUG": "3", "PATH": "/bin"},
}


def test_requests_of_the_job_are_not_compared_with_those_of_a_step() -> None:
    requests = {"SLURM_TRES_PER_TASK": "cpu=4", "SLURM_CPUS_PER_TASK": "4", "SLURM_MEM_PER_CPU": "7"}
    assert environ_of_job(JOB | requests) == JOB


def test_the_cpus_of_the_shell_in_which_a_run_starts_are_not_those_of_its_steps() -> None:
    """``srun -n1 -c1 --pty bash``, and in it ``submit --here``: all roles would share the CPU of the shell."""
    shell = {
        **{
            "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
            "SLURM_CPU_BIND_LIST": "0x1",
            "SLURM_CPU_BIND_TYPE": "mask_cpu:",
        },
        **{
            "SLURM_MEM_BIND": "none",
            "SLURM_DISTRIBUTION": "cyclic",
            "SLURM_NTASKS": "1",
            "SLURM_NNODES": "1",
        },
        **{"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "n1"},
        **{"SLURM_PTY_PORT": "4", "SLURM_SRUN_COMM_HOST": "n1", "SLURM_NODELIST": "n1"},
    }
    assert environ_of_job(JOB | shell) == JOB


# -- filesystems without locks


@pytest.mark.usefixtures("no_locks")
def test_a_process_gets_its_temporary_folder_on_a_filesystem_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"PRIMERL_PRIVATE_TMP": ".p0123456789ab", "TMPDIR": str(tmp_path)}
    tmp = PrivateTmp.create(environ)
    assert tmp is not None and Path(environ["TMPDIR"]).is_dir()
    tmp.release()
    assert delete_abandoned(tmp_path) == []
    monkeypatch.undo()  # the real flock raises ValueError for the lock that could not be taken
    tmp.release()
    assert tmp.folder.is_dir(), "other processes of the run may use it"


def test_the_tmpdir_of_a_job_that_has_ended_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = tmp_path / "job-17"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp = PrivateTmp.create({"PRIMERL_PRIVATE_TMP": ".p0123456789ab", "TMPDIR": str(ended)})
    assert tmp is not None and tmp.folder.parent == tmp_path
    tmp.release()
    script = f"echo {shell_folder(None)}"
    bases = [
        subprocess.run(
            ["bash", "-uc", script], env={"TMPDIR": str(folder)}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for folder in (tmp_path, ended)
    ]
    assert bases == [str(tmp_path), "/tmp"], "where a node unpacks a bundle"


# -- locales


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("words", [["status", "--help"], ["--help"], ["explain", "layout"]])
def test_output_never_ends_a_command_in_an_8_bit_locale(
    words: list[str], encoding: str, tmp_path: Path
) -> None:
    locale = {"LC_ALL": "C", "LANG": "", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    streams = {"PYTHONIOENCODING": encoding} if encoding == "latin-1" else {}
    done = subprocess.run(
        [sys.executable, "-m", "primerl_hpc", *words],
        env={**os.environ, **locale, **streams, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr.decode(errors="replace")
    done.stdout.decode("latin-1" if streams else "utf-8")


def test_files_are_utf8_in_an_8_bit_locale(tmp_path: Path) -> None:
    """A recipe with a value in another script is read, and the value is written unchanged."""
    path = Path(unusable_sft_recipe(tmp_path))
    path.write_text(path.read_text() + "env: {NOTE: Größe 大}\n", encoding="utf-8")
    locale = {"LC_ALL": "C", "LANG": "", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = ["submit", "recipe.yaml", "--profile", "local", "--dry-run", "--run-dir", "run"]
    done = subprocess.run(
        [sys.executable, "-m", "primerl_hpc", *words],
        env={**os.environ, **locale, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert "Größe 大" in (tmp_path / "run" / "recipe.yaml").read_text(encoding="utf-8")
