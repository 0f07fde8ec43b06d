"""Rendered scripts: golden files, shell syntax, shellcheck, and hostile values that must stay text."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.assets import list_assets
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.render.job import render_job

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


@pytest.mark.parametrize("name", [each.removesuffix(".yaml") for each in list_assets("cluster_profiles")])
def test_script_passes_bash_and_shellcheck(name: str, tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(script(load_profile(name).profile))
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", str(path)], check=True)


HOSTILE = st.text(
    alphabet=st.one_of(st.sampled_from("'\"\\$`;|&<>(){}[]*?!#~ \t=%é\u2028"), st.characters(codec="utf-8")),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(value=HOSTILE)
def test_a_hostile_run_directory_and_interpreter_stay_one_word_each(value: str) -> None:
    """The last line runs exactly two words of ours; bash itself is the judge."""
    if "\x00" in value or not value:
        return
    try:
        text = script(load_profile("local").profile, run_dir=f"/r/{value}", python=f"/p/{value}")
    except ConfigError:
        return  # refused is fine too
    # everything from `exec` on: a value with line breaks spans lines
    words = text[text.rindex("\nexec ") + 6 :]
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {words}"], capture_output=True, check=True)
    shown = done.stdout.decode().split("\0")[:-1]
    assert shown == [f"/p/{value}", "-m", "primerl_hpc.runtime.supervisor", f"/r/{value}"]


@settings(max_examples=60, deadline=None)
@given(
    value=HOSTILE,
    key=st.sampled_from(["partition", "account", "qos", "constraint", "reservation", "gpu_type"]),
)
def test_a_hostile_directive_is_one_line_or_refused(value: str, key: str) -> None:
    values = {"name": "p", "nodes": 1, "scheduler": {key: value}}
    try:
        text = script(Profile.model_validate(values))
    except (ConfigError, ValueError):
        return
    plain = script(Profile.model_validate({"name": "p", "nodes": 1, "scheduler": {}}))
    name = "gres" if key == "gpu_type" else key
    mine = [line for line in text.split("\n") if line.startswith(f"#SBATCH --{name}=")]
    assert len(mine) == 1 and value in shlex.split(mine[0].removeprefix("#SBATCH "), comments=False)[0]
    assert _without_directives(text) == _without_directives(plain)


def _without_directives(text: str) -> list[str]:
    return [line for line in text.split("\n") if not line.startswith("#SBATCH")]
