"""Recipes, profiles and templates are searched in the state home of the moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from primerl_hpc.common.assets import asset_roots, find_asset, template_dirs


def test_another_state_home_replaces_the_one_of_an_earlier_search(
    own_state_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asset_roots()[0] == own_state_home
    recipe, templates = tmp_path / "recipes" / "mine.yaml", tmp_path / "templates" / "sbatch"
    for folder in (recipe.parent, templates):
        folder.mkdir(parents=True)
    recipe.touch()
    monkeypatch.setenv("PRIMERL_HOME", str(tmp_path))
    assert find_asset("recipes", "mine") == recipe and template_dirs()[0] == templates
    assert own_state_home not in asset_roots()
    monkeypatch.setenv("PRIMERL_HOME", str(tmp_path / "absent"))
    assert tmp_path not in asset_roots() and templates not in template_dirs()
