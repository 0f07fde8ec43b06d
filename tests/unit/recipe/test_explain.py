"""explain and schema: every key has a type and a meaning."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from primerl_hpc.cli.main import cli
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.assets import find_asset, list_assets
from primerl_hpc.common.document import load_yaml
from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.recipe.explain import explain, explain_all, json_schema
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.recipe.schema.recipe import Recipe


def test_explain_shows_meaning_default_value_and_origin() -> None:
    loaded = load_recipe("reverse_text/tiny", overrides=["rollouts.max_off_policy_steps=1"])
    entry = explain(Recipe, "rollouts.max_off_policy_steps", loaded)
    assert entry["default"] == 8 and entry["value"] == 1 and entry["origin"] == "--set"
    assert "age of a rollout" in entry["meaning"]


def test_a_value_inside_a_mapping_has_the_origin_of_the_mapping(tmp_path: Path) -> None:
    loaded = load_recipe("reverse_text/tiny", overrides=["optimizer={lr: 1e-3}", "warmup=null"])
    entries = {name: explain(Recipe, f"optimizer.{name}", loaded) for name in ("lr", "eps")}
    assert (entries["lr"]["origin"], entries["eps"]["origin"]) == ("--set", "default")
    assert explain(Recipe, "warmup", loaded)["origin"] == "--set"


def test_keys_under_a_role_are_explained() -> None:
    assert "interpreter" in explain(Profile, "software.roles.trainer.python")["meaning"]


def test_explain_finds_keys_of_every_branch_of_a_union() -> None:
    assert explain(Recipe, "loss.clip_high")["type"] == "number"
    assert explain(Recipe, "optimizer.momentum")["default"] == 0.9


def test_explain_shows_the_meaning_of_each_branch_of_a_union() -> None:
    entry = explain(Recipe, "algorithm.type")
    assert {"grpo", "rae", "custom"} <= set(entry["type"].split(" | "))
    assert "rae: Self-play" in entry["meaning"]


def test_explain_shows_the_meaning_of_each_choice_on_its_own_line() -> None:
    lines = explain(Recipe, "layout.inference.routing")["meaning"].split("\n")
    assert [line.partition(": ")[0] for line in lines[1:]] == ["``prefix``", "``session``"]
    assert explain(Recipe, "sft.loss_mask.assistant")["meaning"].count("\n") == 0


def test_an_item_of_a_list_is_named_as_in_set() -> None:
    assert explain(Recipe, "environments.train[0].id") == explain(Recipe, "environments.train.0.id")


@pytest.mark.parametrize(
    "words",
    [
        ("name", "--of", "profile", "--recipe", "reverse_text/tiny"),
        ("name", "--set", "seed=1"),
        ("--recipe", "reverse_text/tiny"),
    ],
    ids=" ".join,
)
def test_explain_refuses_options_without_effect(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, ["explain", *words])
    assert done.exit_code == 2 and "--recipe" in done.output


def test_explain_offers_the_nearest_key() -> None:
    for key, expected in (
        ("trainer.tensor_parallel", "did you mean 'layout.trainer.tensor_parallel'"),
        ("model.untested", "was removed; set model.accept_uncompared"),
    ):
        with pytest.raises(NotFoundError, match=expected):
            explain(Recipe, key)
    with pytest.raises(NotFoundError, match=r"optimizer\.lr"):
        explain(Recipe, "lr")


@pytest.mark.parametrize("root", [Recipe, Profile])
def test_every_key_has_a_type_and_a_meaning(root: type) -> None:
    entries = explain_all(root)
    assert len(entries) > 80 and all(entry["type"] for entry in entries)
    assert [entry["key"] for entry in entries if not entry["meaning"]] == []
    tags = [entry for entry in entries if "\n" in entry["meaning"]]
    assert [
        each["key"] for each in tags if any(line.endswith(": ") for line in each["meaning"].split("\n"))
    ] == []


def test_the_schema_is_json_with_and_without_the_option() -> None:
    output = [
        CliRunner().invoke(cli, ["explain", "--schema", "--of", "profile", *words]).output
        for words in ((), ("--json",))
    ]
    assert output[0] == output[1] and output[0].startswith("{")


def test_the_schema_carries_the_docstrings() -> None:
    properties = json_schema(Recipe)["$defs"]["Rollouts"]["properties"]
    assert properties["batch_size"]["description"].startswith("Rollouts that one trainer step consumes")


@pytest.mark.parametrize(
    ("root", "folder", "name"),
    [(Recipe, "recipes", name) for name in list_assets("recipes")]
    + [(Profile, "cluster_profiles", name) for name in list_assets("cluster_profiles")],
)
def test_the_schema_accepts_every_shipped_file(root: type, folder: str, name: str) -> None:
    Draft202012Validator(json_schema(root)).validate(load_yaml(find_asset(folder, name)).values)


@pytest.mark.parametrize(
    ("recipe", "is_taken"),
    [
        ({"base": ["a.yaml"], "model": {"dtype": "float16"}, "loss": {"type": "dppo", "kl_tau": 0.1}}, True),
        ({"base": "a", "environments": {"train": [{"ratio": 2.0}]}}, False),
        ({"base": 3}, False),
        ({"loss": {"type": "ppo"}}, False),
        ({"max-steps": 3}, False),
    ],
)
def test_the_schema_leaves_to_a_base_what_it_can_complete(recipe: dict, is_taken: bool) -> None:
    assert Draft202012Validator(json_schema(Recipe)).is_valid(recipe) == is_taken
