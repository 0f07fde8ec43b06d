"""Recipes for GPUs: predicted on every profile, with current tables, and chosen by the planner or explained."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.package import package_root
from primerl_hpc.launch.compose import interpreter, plan_run
from primerl_hpc.plan.assess.search import has_auto
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.render.job import render_job
from tests.support.helpers import ROOT
from tools import recipe_table
from tools.bench.rewards import EXPECTED
from tools.recipe_table import RECIPES, SHOWN, gpu_recipes, home_profile

SAMPLE = [
    ("math/qwen3_4b", "h200x8"),
    ("math/kimi_k2", "clariden"),
    ("sft/qwen3_4b", "delta"),
    ("debug/eval", "delta"),
]
"""Rows that are predicted again."""
TOLERANCE = 1.3
"""Ratio by which a recorded figure may differ from today's prediction."""


@cache
def recorded() -> dict[tuple[str, str], dict[str, Any]]:
    return recipe_table.read_rows()


def home_rows() -> list[tuple[str, str]]:
    return [(name, home_profile(RECIPES / f"{name}.yaml")) for name in gpu_recipes()]


def test_the_tables_of_recipes_and_profiles_are_current() -> None:
    """If this fails: tools/recipe_table.py, and after a change of the planner with --all."""
    assert recipe_table.outdated(recorded()) == []


@pytest.mark.parametrize("key", SAMPLE, ids="-".join)
def test_a_recorded_prediction_is_that_of_today(key: tuple[str, str]) -> None:
    now, then = recipe_table.predict_row(*key), recorded()[key]
    assert now["fits"] == then["fits"], f"{now}\n{then}\nrun tools/recipe_table.py --all"
    for name in ("tokens_per_s", "gpu_hours", "trainer_gib", "engine_gib"):
        if then.get(name):
            ratio = now[name] / then[name]
            assert 1 / TOLERANCE < ratio < TOLERANCE, f"{name}: {now[name]}, recorded {then[name]}"


@pytest.mark.parametrize("key", home_rows(), ids=lambda key: key[0])
def test_a_recipe_fits_on_the_profile_that_it_names(key: tuple[str, str]) -> None:
    assert recorded()[key]["fits"] is True, recorded()[key]


def test_what_does_not_fit_has_a_reason() -> None:
    rows = recorded().values()
    assert len(rows) == len(gpu_recipes()) * len(SHOWN)
    assert all(row["fits"] or re.search(r"\d|any number of these nodes", row["missing"]) for row in rows)


@pytest.mark.parametrize("name", gpu_recipes())
def test_a_layout_that_the_planner_did_not_choose_has_a_reason(name: str) -> None:
    """Keys of the layout are `auto`, or there is one way to divide so few GPUs, or a comment has the reason."""
    path = RECIPES / f"{name}.yaml"
    recipe, text = load_recipe(str(path)).recipe, _with_bases(path)
    counts = recipe.layout.inference.replicas, recipe.layout.trainer.ranks
    is_smallest = set(counts) <= {1, "auto"}
    assert has_auto(recipe) or is_smallest or "# Layout:" in text or recipe.kind == "sft", name


def _with_bases(path: Path) -> str:
    text = path.read_text()
    base = re.search(r"^base: (\S+)", text, re.M)
    return text + (_with_bases(path.parent / base[1]) if base else "")


@pytest.mark.parametrize("name", ["terminal/qwen3_30b_a3b", "math/kimi_k2"])
def test_a_recipe_that_was_never_run_is_planned_and_rendered(name: str) -> None:
    loaded = load_recipe(str(RECIPES / f"{name}.yaml"))
    profile = load_profile(home_profile(RECIPES / f"{name}.yaml"))
    planned = plan_run(loaded, profile, missing=[])
    plan, forecast = planned.plan, planned.forecast
    assert forecast.prediction is not None and forecast.prediction.fits
    script = render_job(plan, profile.profile, python=interpreter(profile), package_root=package_root())
    assert f"#SBATCH --nodes={len(plan.nodes)}" in script


def test_kimi_has_engines_for_prompts_next_to_those_that_decode_on_about_1024_gpus() -> None:
    path = RECIPES / "math" / "kimi_k2.yaml"
    plan = plan_run(load_recipe(str(path)), load_profile("h100x1024"), missing=[]).plan
    roles = [process.role.value for process in plan.phase("main").processes]
    assert "prefill" in roles and roles.count("inference") > 4
    assert 960 <= 8 * len(plan.nodes) <= 1024


def test_every_folder_has_a_readme_with_each_of_its_recipes() -> None:
    for folder in {path.parent for path in RECIPES.rglob("*.yaml")}:
        text = (folder / "README.md").read_text()
        missing = [path.stem for path in folder.glob("*.yaml") if f"`{path.stem}`" not in text]
        assert not missing, f"{folder.name}: {missing}"
        assert "What it gave" in text and "Predicted cost" in text


def test_every_small_recipe_has_a_measured_twin() -> None:
    result = json.loads((ROOT / "docs" / "measurements" / "recipe_twins.json").read_text())
    measured = {row["recipe"]: row for row in result["twins"]}
    small = {
        name for name in gpu_recipes() if name.split("/")[0] in ("reverse_text", "alphabet_sort", "wordle")
    }
    small |= {"math/qwen3_4b", "local_search/qwen3_4b"}
    assert small - {"reverse_text/qwen3_0.6b_sft"} == measured.keys() and not result["not_run"]
    for row in measured.values():
        assert row["twin"] in EXPECTED and row["is_met"] and row["after"] > row["before"], row
        shown = f"| `{row['recipe']}` | `{row['twin']}` | {row['before']:.3f} | {row['after']:.3f} |"
        assert shown in (RECIPES / "README.md").read_text()
