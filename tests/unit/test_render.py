"""Rendered scripts: golden files, shell syntax, shellcheck. Hostile values: test_hostile_values.py."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.assets import list_assets
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.render.job import render_engines, render_job

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def script(
    profile: Profile, *, run_dir: str = "/shared/runs/tiny-001", python: str = "/venv/bin/python"
) -> str:
    recipe = load_recipe("reverse_text/tiny").recipe
    plan = compile_plan(recipe, profile, run_dir=run_dir, python=python)
    return render_job(plan, profile, python=python).replace(
        f"primerl-hpc {_version()}", "primerl-hpc VERSION"
    )


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


def test_a_walltime_warning_before_the_supervisor_is_there_ends_nothing() -> None:
    """SLURM may warn in a job's first second; the default action of USR2 is death."""
    profile = load_profile("virtual").profile
    software = profile.software.model_copy(update={"setup": ("kill -USR2 $$",)})
    text = script(profile.model_copy(update={"software": software}), python="/bin/echo")
    done = subprocess.run(["bash", "-c", text], check=True, capture_output=True, text=True)
    assert done.stdout == "-m primerl_hpc.runtime.supervisor /shared/runs/tiny-001\n"
