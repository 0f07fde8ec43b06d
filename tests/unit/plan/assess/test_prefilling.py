"""Engines that only process prompts: memory, times, cost, and the search over their number."""

from __future__ import annotations

import json
from typing import Any

import pytest

from primerl_hpc.checks.recipe.model_config import read_model
from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.launch.planning.alternatives import compare_layouts
from primerl_hpc.launch.planning.forecast import case_for, decide_auto, forecast_plan, refuse_misfit, space_of
from primerl_hpc.plan.assess.choice import apply_choice, choice_of
from primerl_hpc.plan.assess.prediction import predict
from primerl_hpc.plan.assess.remedy import smallest_change
from primerl_hpc.plan.assess.search import has_auto, layouts, search
from primerl_hpc.plan.assess.settle import settle_auto
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe, parse_recipe
from primerl_hpc.recipe.schema.recipe import Recipe
from tests.support.helpers import ROOT
from tests.unit.plan.assess.test_search import recipe_of

EIGHT_B = "Qwen/Qwen3-8B"


def with_prefill(prefill: dict[str, Any], model: str = EIGHT_B, **more: Any) -> Recipe:
    inference = {"tensor_parallel": 1, "prefill": prefill} | more.pop("inference", {})
    layout = {"inference": inference, "trainer": more.pop("trainer_layout", {})}
    return recipe_of(model, layout=layout, **more)


def forecast_of(recipe: Recipe, nodes: int = 8):
    profile = load_profile("h100x64", overrides=[f"nodes={nodes}"]).profile
    decided, _ = decide_auto(recipe, profile, read_model(recipe, profile))
    plan = compile_plan(decided, profile, run_dir="/r", python="python")
    return plan, forecast_plan(plan, profile, read_model(recipe, profile))


def test_the_recipe_of_1024_gpus_is_predicted_with_its_prefill_engines() -> None:
    recipe = load_recipe(str(ROOT / "recipes" / "math" / "kimi_k2.yaml")).recipe
    profile = load_profile("h100x1024").profile
    decided, _ = decide_auto(recipe, profile, read_model(recipe, profile))
    plan = compile_plan(decided, profile, run_dir="/r", python="python")
    prediction = forecast_plan(plan, profile, read_model(recipe, profile)).prediction
    assert prediction is not None and prediction.fits and prediction.choice.prefill is not None
    figures = prediction.figures
    for name in ("memory.prefill", "time.prefill", "time.kv_transfer", "idle.prefill"):
        assert 0 < figures[name].low <= figures[name].value <= figures[name].high
    assert prediction.figure("memory.prefill.weights").value > 30 * 2**30
    assert prediction.figure("run.gpus").value == 8 * len(plan.nodes)
    assert prediction.limits["memory.prefill"] == prediction.limits["memory.engine"]


def test_the_search_finds_the_number_of_prefill_engines_and_the_planner_places_exactly_it() -> None:
    profile = load_profile("h100x64", overrides=["nodes=16"]).profile
    chosen = []
    for prompt, reply in ((500, 4000), (14_000, 100)):
        rollouts = {"expected": {"completion_tokens": reply, "prompt_tokens": prompt}}
        recipe = with_prefill({"replicas": "auto"}, rollouts=rollouts, trainer_layout={"nodes": 12})
        case, space = case_for(recipe, profile, read_model(recipe, profile)), space_of(recipe, profile)
        assert has_auto(recipe) and space.nodes == 16
        for layout in layouts(case, space):
            assert layout.engine_nodes + layout.trainer_nodes + layout.prefill_nodes <= 16
            assert layout.gpus == 128
        best = search(case, space).best
        assert best is not None and best.choice.prefill is not None
        settled = apply_choice(recipe, best.choice)
        assert not has_auto(settled)
        plan = compile_plan(settled, profile, run_dir="/r", python="python")
        assert choice_of(plan.phase("main")) == best.choice
        chosen.append(best.choice.prefill.num_engines)
    assert chosen[0] == 8 < chosen[1]  # long prompts need more engines


def test_a_single_node_is_split_between_both_kinds_of_engines_and_ranks() -> None:
    recipe = with_prefill({"replicas": 2})
    profile = load_profile("h100x64", overrides=["nodes=1"]).profile
    case, space = case_for(recipe, profile, read_model(recipe, profile)), space_of(recipe, profile)
    best = search(case, space).best
    assert best is not None and best.choice.gpus <= 8 and best.choice.prefill_nodes == 0
    plan = compile_plan(apply_choice(recipe, best.choice), profile, run_dir="/r", python="python")
    assert choice_of(plan.phase("main")) == best.choice
    assert predict(case, best.choice).figure("run.gpus").value == 8


def test_fewer_prefill_engines_than_prompts_need_are_the_bottleneck() -> None:
    rollouts = {
        "expected": {"completion_tokens": 50, "prompt_tokens": 14_000},
        "sampling": {"max_tokens": 500},
    }
    recipe = with_prefill({"replicas": 1}, rollouts=rollouts, trainer_layout={"nodes": 13})
    _, forecast = forecast_of(recipe, nodes=16)
    assert forecast.prediction is not None
    assert forecast.prediction.bottleneck == "prefill engines"
    more = with_prefill({"replicas": 8}, rollouts=rollouts, trainer_layout={"nodes": 13})
    _, faster = forecast_of(more, nodes=16)
    assert faster.prediction is not None
    step = "time.step"
    assert faster.prediction.figures[step].value < 0.8 * forecast.prediction.figures[step].value


def test_prefill_engines_without_enough_memory_are_refused_with_the_smallest_change() -> None:
    recipe = with_prefill(
        {"replicas": 4}, "Qwen/Qwen3-32B", inference={"tensor_parallel": 2}, trainer_layout={"nodes": 4}
    )
    _, forecast = forecast_of(recipe)
    assert forecast.prediction is not None and forecast.case is not None and forecast.space is not None
    assert [misfit.role for misfit in forecast.prediction.misfits] == ["prefill engines"]
    with pytest.raises(ConfigError, match="prefill engines need") as caught:
        refuse_misfit(forecast)
    assert "layout.inference.prefill.tensor_parallel to 2" in caught.value.hint
    assert "layout.inference.prefill.replicas to 2" in caught.value.hint
    change = smallest_change(forecast.case, forecast.prediction, forecast.space)
    assert change is not None and predict(forecast.case, change.choice).fits


def test_a_broadcast_changes_both_kinds_of_engines_together() -> None:
    recipe = with_prefill(
        {"replicas": 4}, "Qwen/Qwen3-32B", trainer_layout={"nodes": 4}, weights={"transport": "broadcast"}
    )
    _, forecast = forecast_of(recipe)
    assert forecast.prediction is not None and forecast.case is not None and forecast.space is not None
    change = smallest_change(forecast.case, forecast.prediction, forecast.space)
    assert change is not None and change.choice.prefill is not None
    assert change.choice.prefill.engine_gpus == change.choice.engine_gpus == 2


@pytest.mark.parametrize(
    ("prefill", "transport", "expected"),
    [
        ({"tensor_parallel": 4}, "filesystem", {1, 2, 4, 8}),
        ({"tensor_parallel": 4}, "broadcast", {4}),
        ({"tensor_parallel": "auto"}, "broadcast", {1, 2, 4, 8}),
    ],
)
def test_only_shapes_that_can_exchange_blocks_and_weights_are_searched(
    prefill: dict[str, Any], transport: str, expected: set[int]
) -> None:
    recipe = with_prefill(prefill, inference={"tensor_parallel": "auto"}, weights={"transport": transport})
    profile = load_profile("h100x64").profile
    found = list(layouts(case_for(recipe, profile, read_model(recipe, profile)), space_of(recipe, profile)))
    assert {layout.tensor_parallel for layout in found} & {1, 2, 4, 8} == expected
    for layout in found:
        assert layout.prefill is not None
        if transport == "broadcast":
            assert layout.prefill.engine_gpus == layout.engine_gpus


def test_other_layouts_are_compared_with_and_without_prefill_engines() -> None:
    recipe = with_prefill({"replicas": 1})
    profile = load_profile("h100x64").profile
    _, forecast = forecast_of(recipe)
    _, alternatives = compare_layouts(recipe, profile, forecast)
    kinds = {item.prediction.choice.prefill is None for item in alternatives}
    assert kinds == {True, False}
    assert json.loads(json.dumps([item.as_json() for item in alternatives]))


def test_without_a_prediction_auto_is_one_engine_of_the_shape_of_the_others() -> None:
    names = ("replicas", "tensor_parallel", "data_parallel", "expert_parallel")
    keys: dict[str, Any] = dict.fromkeys(names, "auto")
    settled, notes = settle_auto(with_prefill(keys, inference={"tensor_parallel": 2}))
    prefill = settled.layout.inference.prefill
    assert prefill is not None
    assert prefill.model_dump(exclude={"node_type"}) == {
        "replicas": 1,
        "tensor_parallel": 2,
        "data_parallel": 1,
        "expert_parallel": False,
    }
    assert "layout.inference.prefill.replicas 1" in notes[0]
    assert parse_recipe(settled.model_dump(mode="json", exclude_unset=True)).layout == settled.layout


def test_the_cost_of_a_run_includes_the_nodes_of_a_teacher() -> None:
    recipe = recipe_of(
        algorithm={"type": "opd"},
        teacher={"model": {"name": "Qwen/Qwen3-32B"}, "layout": {"tensor_parallel": 4, "replicas": 3}},
        layout={"inference": {"nodes": 2}, "trainer": {"nodes": 1}},
    )
    plan, forecast = forecast_of(recipe)
    assert forecast.prediction is not None
    assert len(plan.nodes) == 5
    assert forecast.prediction.figure("run.gpus").value == 8 * len(plan.nodes)
