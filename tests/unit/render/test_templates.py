"""A user's own templates: complete or one partial, from three places; an error in them is one sentence with file and
line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import ConfigError, NotFoundError, PrimerlError
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.render import lint
from primerl_hpc.render.job import render_job
from primerl_hpc.render.lint import check_script, warnings_of


def site(tmp_path: Path, **files: str) -> str:
    """A profile with templates of its own next to it; ``__`` in a name is a folder."""
    folder = tmp_path / "mine"
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.j2"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    profile = tmp_path / "site.yaml"
    profile.write_text("name: site\nnode: {gpus: 8}\nscheduler: {partition: gpu}\ntemplates: mine\n")
    return str(profile)


def script(profile: str) -> str:
    loaded = load_profile(profile).profile
    plan = compile_plan(load_recipe("reverse_text/tiny").recipe, loaded, run_dir="/r", python="/py")
    return render_job(plan, loaded, python="/py")


def test_one_partial_takes_the_place_of_the_shipped_one_and_may_include_it(tmp_path: Path) -> None:
    text = '{% include "shipped/partials/directives.j2" %}\n#SBATCH --comment={{ "a b" | directive }}\n'
    made = script(site(tmp_path, partials__directives=text))
    assert "#SBATCH --partition=gpu\n" in made and '#SBATCH --comment="a b"\n' in made
    assert made.endswith("exec /py -m primerl_hpc.runtime.supervisor /r\n")


def test_a_template_extends_the_shipped_one(tmp_path: Path) -> None:
    text = '{% extends "shipped/job.sbatch.j2" %}{% block setup %}source /site/{{ plan.nodes | length }}.sh\n{% endblock %}'  # noqa: E501
    made = script(site(tmp_path, **{"job.sbatch": text}))
    assert "source /site/1.sh\n" in made and "#SBATCH --partition=gpu\n" in made and not warnings_of(made)


def test_the_folder_named_by_the_environment_and_the_state_home_come_before_the_shipped_ones(
    tmp_path: Path, own_state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = own_state_home / "templates" / "sbatch" / "partials"
    home.mkdir(parents=True)
    (home / "environment.j2").write_text("echo home\n")
    assert "echo home\n" in script("h100x64")
    other = tmp_path / "other" / "partials"
    other.mkdir(parents=True)
    (other / "environment.j2").write_text("echo other\n")
    monkeypatch.setenv("PRIMERL_TEMPLATES", str(other.parent))
    assert "echo other\n" in script("h100x64")
    assert "echo profile\n" in script(site(tmp_path, partials__environment="echo profile\n"))


def test_the_frozen_profile_finds_its_templates_from_elsewhere(tmp_path: Path) -> None:
    loaded = load_profile(site(tmp_path, partials__environment="echo profile\n"))
    frozen = tmp_path / "run" / "profile.yaml"
    frozen.parent.mkdir()
    frozen.write_text(loaded.text)
    assert load_profile(str(frozen)).profile == loaded.profile


@pytest.mark.parametrize(
    "text, place, words",
    [
        ("#!/bin/bash\n{% if %}\n", "job.sbatch.j2:2", ["template"]),
        ("#!/bin/bash\n\n{{ plan.nmae }}\n", "job.sbatch.j2:3", ["nmae"]),
        ("#!/bin/bash\n{{ schedular.time }}\n", "job.sbatch.j2:2", ["'schedular' is undefined", "scheduler"]),
        ("#!/bin/bash\n{{ 1 / 0 }}\n", "job.sbatch.j2:2", ["ZeroDivisionError"]),
        ("#!/bin/bash\n{{ plan.name | qq }}\n", "job.sbatch.j2:2", ["qq"]),
        (
            '#!/bin/bash\n{% include "partials/mine.j2" %}\n',
            "job.sbatch.j2:2",
            ["partials/mine.j2", "searched in"],
        ),
        ("echo\n", "job.sbatch:1", ["#!"]),
        ("#!/bin/bash\necho\n\n#SBATCH --nodes=2\n", "job.sbatch:4", ["after the first command (line 2)"]),
        ("#!/bin/bash\n  #SBATCH --nodes=2\n", "job.sbatch:2", ["indented"]),
        ("#!/bin/bash\nif true; then\n", "job.sbatch:", ["bash does not accept"]),
        ("#!/bin/bash\necho 'a\n", "job.sbatch:2", ["bash does not accept"]),
        ("#!/bin/bash\ncat <<EOF\nexec true\n", "job.sbatch:", ["bash does not accept", "here-document"]),
    ],
)
def test_a_fault_in_a_template_is_one_sentence_with_its_line(
    tmp_path: Path, text: str, place: str, words: list[str]
) -> None:
    with pytest.raises(PrimerlError) as caught:
        script(site(tmp_path, **{"job.sbatch": text}))
    said = str(caught.value)
    assert place in caught.value.location and "\n" not in said, said
    assert all(word in said for word in words), said


def test_a_templates_folder_that_is_not_there_is_named_with_its_line(tmp_path: Path) -> None:
    profile = site(tmp_path, partials__environment="")
    shutil.rmtree(tmp_path / "mine")
    with pytest.raises(NotFoundError, match=r"site.yaml:4: templates: folder .*/mine does not exist"):
        load_profile(profile)


def test_shell_that_a_profile_spoils_is_named(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("name: site\nsoftware: {setup: ['if true; then']}\n")
    with pytest.raises(ConfigError, match="bash does not accept the script"):
        script(str(path))


def test_a_supervisor_without_exec_or_none_is_warned_of() -> None:
    start = "/py -m primerl_hpc.runtime.supervisor /r\n"
    assert warnings_of(f"#!/bin/bash\nexec {start}") == []
    assert "does not exec" in warnings_of(f"#!/bin/bash\n{start}")[0]
    assert "does not start the supervisor" in warnings_of("#!/bin/bash\ntrue\n")[0]


def test_without_bash_the_rest_is_still_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    check_script("#!/bin/bash\nif\n", location="x")
    with pytest.raises(ConfigError):
        check_script("if\n", location="x")


def test_a_script_that_bash_does_not_check_in_time_is_not_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lint, "_BASH_TIMEOUT_S", 0.0)
    check_script("#!/bin/bash\nif true; then\n", location="job.sbatch")
    assert "job.sbatch was not checked" in capsys.readouterr().err
