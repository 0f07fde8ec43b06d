"""Engine arguments of the shipped recipes against the recorded options of vLLM's GPU distribution.

If a test fails because a recipe or vLLM changed: ``tools/bench/engine_arguments.py --record``.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from primerl_hpc.common.names import Role
from primerl_hpc.inference.engine_args import engine_args, node_args
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.recipe.schema.recipe import InferenceLayout, Recipe
from tests.support.engine_commands import ADDRESS, gpu_profiles, recipe_names
from tests.support.helpers import ROOT

MEASUREMENTS = ROOT / "docs" / "measurements"
LAYOUTS = [
    {"tensor_parallel": 8, "data_parallel": 1, "expert_parallel": False},
    {"tensor_parallel": 2, "data_parallel": 4, "expert_parallel": True},
]


@cache
def schema() -> dict[str, Any]:
    return json.loads((MEASUREMENTS / "vllm_arguments.json").read_text())


@cache
def recorded() -> dict[str, Any]:
    return json.loads((MEASUREMENTS / "engine_arguments.json").read_text())


def split(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """``--a 1 --b`` → ``[("--a", ["1"]), ("--b", [])]``"""
    options: list[tuple[str, list[str]]] = []
    for part in arguments:
        if part.startswith("--"):
            options.append((part, []))
        else:
            options[-1][1].append(part)
    return options


def faults(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that disagree with the recorded options, each with the reason."""
    found = []
    for name, values in split(arguments):
        kind = schema()["options"].get(name)
        if kind is None:
            found.append(f"{name}: unknown to vLLM {schema()['vllm']}")
        elif kind["values"] in (0, 1) and len(values) != kind["values"]:
            found.append(f"{name}: {len(values)} values, takes {kind['values']}")
        elif kind["values"] == "+" and not values:
            found.append(f"{name}: no value")
        else:
            found += [f"{name}: {value} is not {kind}" for value in values if not accepts(kind, value)]
    return found


def accepts(kind: dict[str, Any], value: str) -> bool:
    if "choices" in kind:
        return value in kind["choices"]
    convert = {"int": int, "float": float, "json": json.loads, "text": str}[kind["type"]]
    try:
        convert(value)
    except ValueError:
        return False
    return True


def served(recipe: Recipe) -> dict[Role, Recipe]:
    """Return the recipe as the engines of each role see it."""
    kinds = {role: recipe.for_frozen(role) for role in recipe.served_models}
    if recipe.layout.inference.prefill is not None:
        kinds[Role.PREFILL] = recipe.for_prefill()
    return {Role.INFERENCE: recipe, **kinds}


def with_layout(recipe: Recipe, values: dict[str, Any]) -> Recipe:
    inference = recipe.layout.inference.model_copy(update=values)
    layout = recipe.layout.model_copy(update={"inference": inference})
    return recipe.model_copy(update={"layout": layout})


@cache
def loaded(name: str) -> Recipe:
    return load_recipe(str(ROOT / "recipes" / f"{name}.yaml")).recipe


def arguments_of(recipe: Recipe, role: Role) -> list[str]:
    return engine_args(recipe, model_path="m", accelerator="gpu", is_prefill=role == Role.PREFILL)


def test_the_options_were_recorded_with_the_vllm_that_is_installed_on_gpus() -> None:
    pins = (ROOT / "constraints" / "gpu.txt").read_text().splitlines()
    assert f"vllm=={schema()['vllm']}" in pins
    assert recorded()["vllm"] == schema()["vllm"]


def test_vllm_accepted_every_recorded_command_line_on_all_profiles() -> None:
    assert recorded()["profiles"] == gpu_profiles()
    assert [
        row["engine"] for row in recorded()["rows"] if row["result"] not in ("configured", "parsed")
    ] == []


def test_every_recorded_command_line_agrees_with_the_options() -> None:
    wrong = {row["engine"]: faults(shlex.split(row["arguments"])) for row in recorded()["rows"]}
    assert {engine: found for engine, found in wrong.items() if found} == {}


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_uses_options_of_vllm_in_every_layout(name: str) -> None:
    for role, recipe in served(loaded(name)).items():
        for values in LAYOUTS:
            layout = InferenceLayout.model_validate(values)
            arguments = arguments_of(with_layout(recipe, values), role)
            assert faults(arguments) == []
            for node in (0, 1):
                assert faults([*arguments, *node_args(layout, 2, node, ADDRESS)]) == []


def test_the_options_of_a_recipe_are_those_of_its_recorded_command_lines() -> None:
    of_layouts = {name for values in LAYOUTS for name, _ in split(node_options(values))}
    of_layouts.add("--enable-expert-parallel")
    for row in recorded()["rows"]:
        role = Role(row["role"])
        recipe = served(loaded(row["recipe"]))[role]
        now = {name for name, _ in split(arguments_of(recipe, role))} - of_layouts
        then = {name for name, _ in split(shlex.split(row["arguments"]))} - of_layouts
        assert now == then, row["engine"]


def node_options(values: dict[str, Any]) -> list[str]:
    layout = InferenceLayout.model_validate(values)
    return [part for node in (0, 1) for part in node_args(layout, 2, node, ADDRESS)]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tensor-paralel-size", "2"], "unknown"),
        (["--tensor-parallel-size", "two"], "is not"),
        (["--tensor-parallel-size"], "0 values"),
        (["--enable-lora", "yes"], "1 values"),
        (["--max-lora-rank", "7"], "is not"),
        (["--kv-transfer-config", "{"], "is not"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_argument_is_found(arguments: list[str], reason: str) -> None:
    assert [reason in fault for fault in faults(arguments)] == [True]
