"""Rendered scripts: golden files, shell syntax, shellcheck. Hostile values: test_hostile_values.py."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.assets import list_assets
from primerl_hpc.common.document import dump_yaml
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.render.job import SETUP_SCRIPT, render_engines, render_job, render_setup
from primerl_hpc.render.requests import type_request

GOLDEN = Path(__file__).resolve().parents[2] / "golden"


def script(
    profile: Profile, *, run_dir: str = "/shared/runs/tiny-001", python: str = "/venv/bin/python"
) -> str:
    recipe = load_recipe("reverse_text/tiny").recipe
    plan = compile_plan(recipe, profile, run_dir=run_dir, python=python)
    return render_job(plan, profile, python=python).replace(
        f"primerl-hpc {_version()}", "primerl-hpc VERSION"
    )


def made_run_dir(tmp_path: Path) -> str:
    (tmp_path / "run" / "launch").mkdir(parents=True)
    (tmp_path / "run" / "launch" / SETUP_SCRIPT).write_text(render_setup(load_profile("virtual").profile))
    return str(tmp_path / "run")


def _version() -> str:
    import primerl_hpc

    return primerl_hpc.__version__


@pytest.mark.parametrize("name", [each.removesuffix(".yaml") for each in list_assets("cluster_profiles")])
def test_script_of_every_profile_is_as_recorded(name: str, request: pytest.FixtureRequest) -> None:
    text = script(load_profile(name).profile)
    golden = GOLDEN / f"{name}.sbatch"
    if request.config.getoption("--update-golden"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("path", sorted(GOLDEN.rglob("*.sbatch")), ids=lambda path: path.stem)
def test_every_golden_script_passes_bash_and_shellcheck(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", str(path)], check=True)


def test_spare_nodes_are_asked_for_and_a_lost_node_does_not_end_the_job() -> None:
    profile = load_profile("virtual").profile
    scheduler = profile.scheduler.model_copy(update={"spare_nodes": 2})
    lines = script(profile.model_copy(update={"scheduler": scheduler})).splitlines()
    plain = script(profile).splitlines()
    assert "#SBATCH --nodes=2" in plain and "#SBATCH --no-kill" not in plain
    assert "#SBATCH --nodes=4" in lines and "#SBATCH --no-kill" in lines


@pytest.mark.parametrize(("profile", "memory"), [("lumi", "--mem=61440M"), ("h100x64", "--mem=237G")])
def test_an_elastic_engine_asks_for_its_share_of_a_nodes_memory(profile: str, memory: str) -> None:
    elastic = ["layout.inference={elastic: true, replicas: 2}", "warmup=null"]
    where = load_profile(profile).profile
    plan = compile_plan(
        load_recipe("reverse_text/tiny", overrides=elastic).recipe, where, run_dir="/r", python="/p"
    )
    asked = [line for line in render_engines(plan, where, python="/p").splitlines() if "--mem=" in line]
    assert asked == [f"#SBATCH {memory}"]


def test_a_walltime_warning_before_the_supervisor_is_there_ends_nothing(tmp_path: Path) -> None:
    """SLURM may warn in a job's first second; the default action of USR2 is death."""
    profile = load_profile("virtual").profile
    software = profile.software.model_copy(update={"setup": ("kill -USR2 $$",)})
    run_dir = made_run_dir(tmp_path)
    text = script(profile.model_copy(update={"software": software}), run_dir=run_dir, python="/bin/echo")
    done = subprocess.run(["bash", "-c", text], check=True, capture_output=True, text=True)
    assert done.stdout == f"-m primerl_hpc.runtime.supervisor {run_dir}\n"


@pytest.mark.parametrize(("time", "warned"), [("00:01:30", []), ("00:02:30", ["60"]), ("01:00:00", ["70"])])
def test_slurm_sends_no_warning_while_a_short_job_starts(time: str, warned: list[str]) -> None:
    """Its signal ends a batch script that has not reached its first line."""
    changes = [f"scheduler.time={time}", "scheduler.signal_margin_s=70"]
    text = script(load_profile("virtual", overrides=changes).profile)
    assert re.findall("--signal=B:USR2@(.*)", text) == warned


# -- lines of the setup that fail
# -------------------------------------------------------------------------------------------


def with_software(**software: object) -> Profile:
    values = load_profile("virtual").profile.model_dump()
    values["software"] |= software
    return Profile.model_validate(values)


def run_script(tmp_path: Path, **software: object) -> tuple[int, str, str]:
    """Exit code and output of the rendered script alone, and the arguments with which it ends; python is a spy."""
    spy = tmp_path / "python"
    spy.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >"$0.said"\n')
    spy.chmod(0o755)
    path, log = tmp_path / "job.sh", tmp_path / "log"
    path.write_text(script(with_software(**software), run_dir=made_run_dir(tmp_path), python=str(spy)))
    with log.open("wb") as file:
        done = subprocess.run(["bash", str(path)], stdout=file, stderr=file, cwd=tmp_path, check=False)
    return done.returncode, log.read_text(), Path(f"{spy}.said").read_text()


def test_the_script_of_a_setup_with_optional_lines_is_as_recorded(request: pytest.FixtureRequest) -> None:
    modules = ["gcc/13", {"name": "nccl/2.28", "optional": True}]
    setup = ["umask 027", {"run": "ulimit -l unlimited", "optional": True}]
    setup += ["if [ -d /opt/site ]; then", "export SITE=/opt/site", "fi"]
    text = script(with_software(modules=modules, setup=setup))
    golden = GOLDEN / "setup" / "setup.sbatch"
    if request.config.getoption("--update-golden"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


FAILING = [
    ({"modules": ["nccl/2.99"]}, "module load nccl/2.99", 127, "command not found"),
    ({"setup": ["source /nonexistent/site.sh"]}, "source /nonexistent/site.sh", 1, "No such file"),
    ({"setup": ["true", "echo no license >&2; exit 3", "true"]}, "echo no license", 3, "no license"),
    ({"setup": ["set -u", 'echo "$UNSET"']}, 'echo "$UNSET"', 1, "unbound variable"),
    ({"setup": ["if true; then", "ls /nonexistent", "fi"]}, "if true; then", 2, "cannot access"),
    ({"setup": ["site() { echo no site >&2; return 4; }", "site x"]}, "site x", 4, "no site"),
]


def test_the_file_that_scripts_with_setup_lines_source_passes_shellcheck(tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    path = tmp_path / SETUP_SCRIPT
    path.write_text(render_setup(load_profile("virtual").profile))
    subprocess.run(["shellcheck", "--shell=bash", str(path)], check=True)


@pytest.mark.parametrize("software, line, status, words", FAILING, ids=lambda value: str(value)[:40])
def test_a_line_of_the_setup_that_fails_ends_the_script_with_78_and_is_reported(
    tmp_path: Path, software: dict[str, list[str]], line: str, status: int, words: str
) -> None:
    code, log, said = run_script(tmp_path, **software)
    assert code == 78, log
    assert f"failed with exit status {status}: {line}" in log and words in log
    module, run_dir, option, told_status, told_line, *output = said.splitlines()[1:]
    assert module == "primerl_hpc.runtime.supervisor" and run_dir == str(tmp_path / "run")
    assert option == "--setup-failure"
    assert told_status == str(status) and told_line.startswith(line) and words in "\n".join(output)


def test_environment_modules_3_report_a_missing_module_with_exit_status_0(tmp_path: Path) -> None:
    words = "ModuleCmd_Load.c(213):ERROR:105: Unable to locate a modulefile for 'cuda'"
    (tmp_path / "modules.sh").write_text(f'module() {{ echo "{words}" >&2; return 0; }}\n')
    text = script(with_software(modules=["cuda"]), run_dir=made_run_dir(tmp_path), python="/bin/echo")
    path, log = tmp_path / "job.sh", tmp_path / "log"
    first, rest = text.split("setup_modules\n", 1)
    path.write_text(f"{first}source {tmp_path}/modules.sh\nsetup_modules\n{rest}")
    with log.open("wb") as file:
        done = subprocess.run(["bash", str(path)], stdout=file, stderr=file, check=False)
    assert done.returncode == 78 and words in log.read_text()


def test_what_works_without_the_check_works_with_it(tmp_path: Path) -> None:
    """Nothing of `set -e`: site scripts with failing commands, unset variables and conditions, conda, constructs over
    lines."""
    site = "grep nothing /etc/passwd\nX=$UNSET\n[ -d /nonexistent ] && echo x\nfalse\nexport SITE=site\n"
    (tmp_path / "site.sh").write_text(site)
    (tmp_path / "conda.sh").write_text("conda() { false; grep nothing /etc/passwd; export ENV=$2; }\n")
    setup = [
        *(
            "source ./site.sh",
            "source ./conda.sh",
            "conda activate my",
            "[ -d /nonexistent ] && source /nonexistent",
        ),
        *("! false", "false || true", "false; true", "if [ -d /nonexistent ]; then", "false", "fi"),
        *(
            "cat >here <<EOF",
            "  it's $SITE",
            "EOF",
            "export LONG=\\",
            "line # a comment",
            "# nothing but a comment",
        ),
        *("for x in 1 2; do", "export LAST=$x", "done", "(sleep 0 &)", "exec 2>&1", "trap 'true' EXIT"),
        {"run": "ls /nonexistent", "optional": True},
        'printf "%s " "$SITE" "$ENV" "$LONG" "$LAST" >seen',
    ]
    code, log, said = run_script(tmp_path, setup=setup, modules=[{"name": "x", "optional": True}])
    assert code == 0, log
    assert said.splitlines()[1] == "primerl_hpc.runtime.supervisor"
    assert (tmp_path / "seen").read_text() == "site my line 2 "
    assert (tmp_path / "here").read_text() == "  it's site\n"
    assert "warning: an optional setup line failed with exit status 2: ls /nonexistent" in log


@pytest.mark.parametrize(
    "software, words",
    [
        ({"setup": [{"run": "true", "optinal": True}]}, "optional"),
        ({"setup": [{"optional": True}]}, "run"),
        ({"modules": [{"run": "x"}]}, "software.modules.0.run"),
        ({"modules": [3]}, "modules"),
    ],
)
def test_a_wrong_form_of_a_line_is_refused_by_its_key(
    tmp_path: Path, software: dict[str, object], words: str
) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(dump_yaml({"name": "site", "software": software}))
    with pytest.raises(ConfigError) as caught:
        load_profile(str(path))
    assert words in str(caught.value) and "site.yaml:" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("own", "expected"), [(", memory: 300G", ("300G", None)), ("", (None, "60G"))])
def test_the_memory_of_a_node_type_replaces_the_share_of_each_gpu(
    own: str, expected: tuple[str | None, str | None]
) -> None:
    types = f"node_types.l40s={{nodes: 4, gpus: 8, gpu: L40S{own}}}"
    overrides = [types, "scheduler.memory=null", "scheduler.memory_per_gpu=60G"]
    profile = load_profile("h100x64", overrides=overrides).profile
    scheduler = type_request(profile, "l40s").scheduler
    assert (scheduler.memory, scheduler.memory_per_gpu) == expected
