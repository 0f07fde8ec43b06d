"""A new recipe plans on its profile, has the planner's layout, and reports how many GPUs are missing."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import ConfigError, OccupiedError
from primerl_hpc.common.names import Kind
from primerl_hpc.launch.compose import plan_run
from primerl_hpc.launch.new_recipe.draft import Draft, make_draft, write_draft
from primerl_hpc.launch.new_recipe.request import KINDS, METHODS, NEEDS, RecipeRequest
from primerl_hpc.launch.planning.forecast import refuse_misfit
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.plan.predict.shape import known_config
from primerl_hpc.recipe.load import load_recipe

SMALL, MIXTURE, LARGE = "Qwen/Qwen3-4B", "Qwen/Qwen3-30B-A3B", "moonshotai/Kimi-K2-Instruct"


def request(kind: Any = "rl", model: str = SMALL, profile: str = "h100x64", **more: Any) -> RecipeRequest:
    answers: dict[str, Any] = {
        "rl": {"environment": "math-problems"},
        "sft": {"data": "org/rows"},
        "distillation": {"environment": "math-problems", "teacher": "Qwen/Qwen3-32B"},
        "evaluation": {"environment": "math-problems"},
    }[kind]
    return RecipeRequest(kind, model, load_profile(profile), **{**answers, **more})


@cache
def on_one_node() -> Draft:
    return make_draft(request(gpus=8))


@pytest.mark.parametrize(
    ("kind", "model", "gpus"),
    [
        ("rl", SMALL, 2),
        ("rl", MIXTURE, 16),
        ("sft", SMALL, 1),
        ("sft", MIXTURE, 16),
        ("distillation", SMALL, 8),
        ("distillation", SMALL, 24),
        ("evaluation", SMALL, 1),
        ("evaluation", MIXTURE, 16),
    ],
)
def test_what_is_written_plans_and_fits_and_uses_the_gpus(kind: Any, model: str, gpus: int) -> None:
    draft = make_draft(request(kind, model, gpus=gpus))
    planned = plan_run(draft.loaded, draft.request.profile, missing=[])
    plan, forecast = planned.plan, planned.forecast
    refuse_misfit(forecast)
    assert draft.sized is not None and len(plan.nodes) == max(1, gpus // 8)
    used = {
        (node, gpu)
        for process in plan.phases[0].processes
        for node in process.nodes
        for gpu in process.accelerators
    }
    assert 0.7 * gpus <= len(used) <= gpus
    if forecast.prediction is not None and kind in ("rl", "distillation"):
        choice = forecast.prediction.choice
        assert (choice.num_engines, choice.trainer_ranks, choice.context_parallel) == (
            draft.sized.choice.num_engines,
            draft.sized.choice.trainer_ranks,
            draft.sized.choice.context_parallel,
        )


def test_every_choice_is_explained_next_to_its_key() -> None:
    draft = on_one_node()
    text, sized = draft.text, draft.sized
    assert sized is not None and sized.steps_by_staleness is not None
    lines = text.splitlines()
    above = "\n".join(lines[: lines.index(next(line for line in lines if line.startswith("layout:")))])
    assert f"the fastest of {sized.num_layouts} layouts" in above.replace("\n# ", " ")
    assert "max_off_policy_steps is the least" in text and f"max_off_policy_steps: {sized.staleness}" in text
    assert max(map(len, lines)) <= 110
    assert draft.loaded.recipe.rollouts.max_off_policy_steps == sized.staleness


def test_a_smaller_staleness_is_chosen_where_it_costs_nothing() -> None:
    sized = on_one_node().sized
    assert sized is not None and sized.steps_by_staleness is not None
    fastest = min(sized.steps_by_staleness.values())
    slower = [step for age, step in sized.steps_by_staleness.items() if age < sized.staleness]
    assert sized.steps_by_staleness[sized.staleness] <= 1.02 * fastest
    assert all(step > 1.02 * fastest for step in slower)


@pytest.mark.parametrize(
    ("wanted", "needed"),
    [
        (request(model="Qwen/Qwen3-235B-A22B", gpus=1), None),
        (request("distillation", gpus=2), 3),
        (request(model=LARGE), None),
        (request("evaluation", model="Qwen/Qwen3-235B-A22B", gpus=4), 8),
    ],
    ids=["235B parameters", "a teacher", "1T parameters", "engines"],
)
def test_too_few_gpus_are_refused_with_the_number_that_is_needed(
    wanted: RecipeRequest, needed: int | None
) -> None:
    with pytest.raises(ConfigError, match="needs at least") as caught:
        make_draft(wanted)
    number = int(caught.value.cause.split("needs at least ")[1].split()[0])
    assert needed in (None, number)
    if number <= 64:
        assert f"--gpus {number}" in caught.value.hint
        assert make_draft(replace(wanted, gpus=number)).sized is not None
    else:
        assert "has 64 GPUs" in caught.value.hint and number % 8 == 0


@pytest.mark.parametrize(
    ("wanted", "cause"),
    [
        (request(model="Qwen/Nope"), "shape of model Qwen/Nope is unknown"),
        (request(gpus=12), "12 GPUs are not a number of complete nodes"),
        (request(gpus=72), "has 64 GPUs, 72 were given"),
        (request(name="a b"), "name"),
        (
            request("distillation", teacher="zai-org/GLM-5.1", profile="a100x32"),
            "teacher zai-org/GLM-5.1 does not",
        ),
        (request("distillation", gpus=16), "2 nodes are too few for the teacher"),
        (request("distillation", teacher="Qwen/Nope"), "shape of model Qwen/Nope is unknown"),
    ],
    ids=["model", "part of a node", "too many", "name", "teacher", "nodes", "unknown teacher"],
)
def test_invalid_answers_are_refused_in_one_sentence(wanted: RecipeRequest, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        make_draft(wanted)


@pytest.mark.parametrize("kind", ["rl", "sft", "evaluation"])
def test_a_profile_without_gpus_gets_one_process_of_each_role(kind: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**known_config(SMALL), "max_position_embeddings": 256}))
    draft = make_draft(request(kind, model=str(folder), profile="local"))
    recipe = draft.loaded.recipe
    assert (recipe.seq_len, recipe.model.dtype, draft.sized) == (256, "float32", None)
    plan = compile_plan(recipe, load_profile("local").profile, run_dir="/r", python="/py")
    assert len(plan.nodes) == 1


def test_an_unknown_family_leaves_the_layout_to_fixed_rules(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "brand_new"}))
    draft = make_draft(request(model=str(tmp_path)))
    assert draft.sized is None and draft.loaded.recipe.layout.inference.nodes == "auto"
    assert "because nothing is predicted" in draft.text


@pytest.mark.parametrize("method", METHODS)
def test_a_distillation_has_its_teacher_and_method(method: str) -> None:
    recipe = make_draft(request("distillation", method=method, gpus=4)).loaded.recipe
    assert (recipe.kind, recipe.algorithm.type) == (Kind.RL, method)
    assert recipe.teacher is not None and recipe.teacher.model.name == "Qwen/Qwen3-32B"


def test_adapters_and_arguments_are_written() -> None:
    wanted = request(lora_rank=8, gpus=2, environment_args={"kinds": ["linear"], "split": "train"})
    recipe = make_draft(wanted).loaded.recipe
    assert recipe.lora is not None and (recipe.lora.rank, recipe.lora.alpha) == (8, 16)
    assert recipe.environments.train[0].args == {"kinds": ["linear"], "split": "train"}
    assert not recipe.environments.eval and recipe.weights.transport == "filesystem"


def test_every_kind_needs_a_model_and_a_profile() -> None:
    assert all({"model", "profile"} <= set(NEEDS[kind]) for kind in KINDS)


def test_an_existing_file_is_only_replaced_by_force(tmp_path: Path) -> None:
    path, draft = tmp_path / "my.yaml", on_one_node()
    path.write_text("mine")
    with pytest.raises(OccupiedError, match="--force"):
        write_draft(draft, path, is_forced=False)
    assert path.read_text() == "mine"
    write_draft(draft, path, is_forced=True)
    assert load_recipe(str(path)).recipe == draft.loaded.recipe
