"""The examples of docs/cluster-profiles.md work as they stand there."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from primerl_hpc.cluster.directives import OPTION_OF_KEY
from primerl_hpc.cluster.load import load_profile
from primerl_hpc.cluster.scheduler_schema import Scheduler
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.render.job import render_job
from tests.support.helpers import ROOT
from tests.support.sbatch import read_directives

PAGE = (ROOT / "docs" / "cluster-profiles.md").read_text()


def profile_of_the_page(folder: Path) -> str:
    start = PAGE.index("       name: my-site")
    text = textwrap.dedent(PAGE[start : PAGE.index("\n\n4. ", start)])
    (folder / "my-site.yaml").write_text(text)
    return str(folder / "my-site.yaml")


def test_the_profile_of_the_page_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = load_profile(profile_of_the_page(tmp_path)).profile
    assert profile.scheduler.time == "24:00:00" and profile.software.modules == ("cuda/12.8",)
    monkeypatch.setenv("USER", "ada")
    assert profile.runs_folder() == Path("/scratch/ada/runs")
    monkeypatch.delenv("USER")
    with pytest.raises(ConfigError, match=r"\$USER, which is not set"):
        profile.runs_folder()


def test_the_templates_of_the_page_render(tmp_path: Path) -> None:
    for name, text in re.findall(r"    \{# (\S+) #\}\n((?:    .*\n)+)", PAGE):
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    loaded = load_profile(profile_of_the_page(tmp_path), overrides=["templates=mine"]).profile
    plan = compile_plan(load_recipe("reverse_text/tiny").recipe, loaded, run_dir="/r", python="/py")
    script = render_job(plan, loaded, python="/py")
    assert dict(read_directives(script))["comment"] == "run reverse-text-tiny"
    assert "\nsource /site/gpu-8.sh\n" in script and script.endswith("runtime.supervisor /r\n")


def test_the_page_names_every_key_of_the_scheduler() -> None:
    named = set(re.findall(r"`([a-z_]+)`", PAGE))
    assert set(Scheduler.model_fields) - {"type"} <= named and set(OPTION_OF_KEY) <= named


def test_no_page_has_the_marks_of_an_unfinished_merge() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    marked = [
        page.name for page in pages if re.search(r"^(<{7}|={7}|>{7})( |$)", page.read_text(), re.MULTILINE)
    ]
    assert pages and not marked
