"""`auto`: explicit values stay, the result is deterministic and fits, and searching is fast."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.plan.assess.case import Case, make_case
from primerl_hpc.plan.assess.choice import apply_choice, choice_of
from primerl_hpc.plan.assess.parts import Parts
from primerl_hpc.plan.assess.prediction import predict, trainer_fits
from primerl_hpc.plan.assess.search import Space, has_auto, layouts, search
from primerl_hpc.plan.assess.variants import trainer_variants
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.plan.predict.shape import known_shape
from primerl_hpc.recipe.load import parse_recipe

EIGHT_B, MIXTURE = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"
AUTO: dict[str, Any] = {
    "layout": {
        "inference": {"tensor_parallel": "auto", "data_parallel": "auto", "expert_parallel": "auto"},
        "trainer": {"context_parallel": "auto"},
    },
    "trainer": dict.fromkeys(
        ("activation_checkpointing", "activation_offload", "optimizer_offload", "cpu_offload"), "auto"
    ),
}


def recipe_of(model: str = EIGHT_B, **more: Any):
    rollouts = {
        "batch_size": 256,
        "group_size": 8,
        "sampling": {"max_tokens": 8192},
        "expected": {"completion_tokens": 2000},
    }
    values: dict[str, Any] = {
        "kind": "rl",
        "name": "x",
        "model": {"name": model},
        "seq_len": 16_384,
        "max_steps": 100,
        "environments": {"train": [{"id": "reverse-text"}]},
        "rollouts": rollouts | more.pop("rollouts", {}),
    }
    return parse_recipe(values | more)


def case_of(model: str = EIGHT_B, nodes: int = 8, **more: Any) -> tuple[Case, Space]:
    profile = load_profile("h100x64", overrides=[f"nodes={nodes}"]).profile
    return make_case(recipe_of(model, **more), profile, known_shape(model)), Space(nodes, 8)


@pytest.mark.parametrize("model", [EIGHT_B, MIXTURE])
def test_the_chosen_layout_fits_and_is_the_same_every_time(model: str) -> None:
    case, space = case_of(model, **AUTO)
    first, second = search(case, space), search(case, space)
    assert first.best is not None and second.best is not None
    assert first.best.fits
    assert first.best.choice == second.best.choice
    assert [item.choice for item in first.simulated] == [item.choice for item in second.simulated]
    assert first.num_layouts >= 100


def test_the_planner_accepts_the_chosen_layout_and_places_exactly_it() -> None:
    case, space = case_of(**AUTO)
    best = search(case, space).best
    assert best is not None
    settled = apply_choice(case.recipe, best.choice)
    assert not has_auto(settled)
    plan = compile_plan(settled, load_profile("h100x64").profile, run_dir="/r", python="python")
    placed = choice_of(plan.phase("main"), case.shape.num_experts)
    assert placed == best.choice


@pytest.mark.parametrize("nodes", [7, 8, 13])
def test_engines_of_several_nodes_leave_no_node_of_theirs_idle(nodes: int) -> None:
    case, space = case_of("Qwen/Qwen3-235B-A22B", nodes=nodes, **AUTO)
    wide = [choice for choice in layouts(case, space) if choice.engine_gpus > 8]
    assert wide and all(choice.num_engines * choice.engine_gpus == 8 * choice.engine_nodes for choice in wide)
    choice = next(choice for choice in wide if choice.engine_nodes + choice.trainer_nodes < nodes)
    profile = load_profile("h100x64", overrides=[f"nodes={nodes}"]).profile
    plan = compile_plan(apply_choice(case.recipe, choice), profile, run_dir="/r", python="python")
    assert choice_of(plan.phase("main"), case.shape.num_experts).engine_nodes == choice.engine_nodes


def test_no_data_parallel_rank_of_an_engine_spans_nodes() -> None:
    case, _ = case_of("Qwen/Qwen3-235B-A22B", **AUTO)
    found = list(layouts(case, Space(16, 4)))
    assert {choice.tensor_parallel for choice in found} >= {8}
    assert all(choice.tensor_parallel <= 4 for choice in found if choice.data_parallel > 1)


def test_a_trainer_with_evaluations_is_searched_without_their_engines() -> None:
    profile = load_profile("h100x64", overrides=["nodes=1"]).profile
    values = {"kind": "sft", "name": "x", "model": {"name": EIGHT_B}, "seq_len": 8192, "max_steps": 10}
    values |= {"sft": {"data": {"path": "a/b"}, "batch_size": 16}, "layout": {"trainer": {"ranks": 4}}}
    values |= {"trainer": {"activation_checkpointing": "auto"}}
    values |= {"evaluation": {"every": 5}, "environments": {"eval": [{"id": "reverse-text"}]}}
    recipe = parse_recipe(values)
    assert recipe.has_engines and has_auto(recipe)
    found = search(make_case(recipe, profile, known_shape(EIGHT_B)), Space(1, 8))
    assert found.best is not None and found.best.choice.trainer_ranks == 4, found.reason


def test_explicit_values_are_never_changed() -> None:
    layout = {"inference": {"nodes": 6, "tensor_parallel": 2}, "trainer": {"nodes": 2}}
    case, space = case_of(layout=layout)
    assert {(choice.engine_nodes, choice.trainer_nodes) for choice in layouts(case, space)} == {(6, 2)}
    assert {choice.tensor_parallel for choice in layouts(case, space)} == {2}
    settled = apply_choice(case.recipe, next(iter(layouts(case, space))))
    assert settled.layout.inference.nodes == 6 and settled.layout.trainer.nodes == 2
    assert settled.trainer == case.recipe.trainer


@pytest.mark.parametrize("ranks", [2, 6])
def test_ranks_that_cannot_be_divided_among_their_nodes_are_refused(ranks: int) -> None:
    case, space = case_of(layout={"trainer": {"nodes": 4, "ranks": ranks, "tensor_parallel": "auto"}})
    with pytest.raises(ConfigError, match=f"layout.trainer.ranks {ranks} on 4 nodes of 8 accelerators"):
        search(case, space)


def test_a_recipe_that_counts_engines_and_ranks_keeps_sharing_a_node() -> None:
    layout = {"inference": {"replicas": 4, "tensor_parallel": "auto"}, "trainer": {"ranks": 4}}
    case, space = case_of(layout=layout)
    best = search(case, space).best
    assert best is not None
    settled = apply_choice(case.recipe, best.choice)
    assert settled.layout.inference.nodes == settled.layout.trainer.nodes == "auto"
    plain = {"inference": {"replicas": 4}, "trainer": {"ranks": 4}}
    assert not has_auto(recipe_of(layout=plain))


def test_no_better_layout_is_missed_among_all_that_are_enumerated() -> None:
    """The closed form ranks; no enumerated layout with the same options is more than a tenth faster when simulated."""
    case, space = case_of(nodes=4)
    best = search(case, space).best
    assert best is not None
    for choice in layouts(case, space):
        other = predict(case, choice, depth="quick")
        if "time.step" in other.figures:
            assert other.figures["time.step"].value >= 0.9 * best.figures["time.step"].value


def test_a_model_that_is_too_large_for_the_nodes_has_no_layout() -> None:
    case, space = case_of("moonshotai/Kimi-K2-Instruct", nodes=2, **AUTO)
    found = search(case, space)
    assert found.best is None
    assert sum(found.pruned.values()) > 0
    assert found.nearest is not None and found.nearest.misfits


def test_why_no_layout_fits_names_the_closest_one() -> None:
    case, space = case_of("moonshotai/Kimi-K2-Instruct", nodes=2, **AUTO)
    found = search(case, space)
    assert found.nearest is not None
    assert f"the closest is {found.nearest.choice}: " in found.reason and "too much" in found.reason
    fitting, nodes = case_of()
    assert search(fitting, nodes).reason == ""


def hsdp(nodes: int, **trainer: Any) -> dict[str, Any]:
    return {"layout": {"trainer": {"nodes": nodes, "replicate": "auto"} | trainer}}


def test_replicas_of_the_trainer_are_searched_and_pruned_by_memory() -> None:
    small, space = case_of("Qwen/Qwen3-0.6B", nodes=5, **hsdp(4))
    large, _ = case_of("Qwen/Qwen3-32B", nodes=5, **hsdp(4), inference={"gpu_memory_utilization": 0.95})
    assert has_auto(small.recipe)
    (base,) = layouts(small, space)
    assert sorted({item.replicate for item in trainer_variants(small, base)}) == [1, 2, 4]
    parts = Parts(large)
    fits = {item.replicate: trainer_fits(parts, item) for item in trainer_variants(large, base)}
    assert fits == {1: True, 2: True, 4: False}
    best = search(small, space).best
    assert best is not None
    settled = apply_choice(small.recipe, best.choice)
    assert settled.layout.trainer.replicate == best.choice.replicate
    assert {True} == {
        predict(small, best.choice, depth="closed_form").figure("time.trainer.step").value
        <= predict(small, replace(best.choice, replicate=number), depth="closed_form")
        .figure("time.trainer.step")
        .value
        for number in (1, 2, 4)
    }


def test_tensor_parallelism_of_the_trainer_is_searched_where_ranks_have_few_rows() -> None:
    usual = {"sampling": {"max_tokens": 2048}, "expected": {"completion_tokens": 500}}
    layout = {"inference": {"tensor_parallel": "auto"}}
    layout |= {"trainer": {"nodes": 4, "context_parallel": "auto", "tensor_parallel": "auto"}}
    more = AUTO | {"seq_len": 4096, "layout": layout}
    case, space = case_of("Qwen/Qwen3-32B", rollouts=usual | {"batch_size": 16}, **more)
    best = search(case, space).best
    assert best is not None and best.choice.trainer_tensor_parallel > 1, best
    trainer = apply_choice(case.recipe, best.choice).layout.trainer
    assert trainer.tensor_parallel == best.choice.trainer_tensor_parallel
    parts, alone = Parts(case), replace(best.choice, trainer_tensor_parallel=1)
    assert parts.trainer_step_s(best.choice) < parts.trainer_step_s(alone)
    more["trainer"] = AUTO["trainer"] | {"vision": "frozen"}  # ranks cannot share rows with images
    frozen, space = case_of("Qwen/Qwen3-32B", rollouts=usual | {"batch_size": 16}, **more)
    best = search(frozen, space).best
    assert best and (best.choice.trainer_tensor_parallel, best.choice.context_parallel) == (1, 1), best
    more["trainer"] = AUTO["trainer"]
    many, space = case_of("Qwen/Qwen3-32B", rollouts=usual | {"batch_size": 1024}, **more)
    best = search(many, space).best
    assert best is not None and best.choice.trainer_tensor_parallel == 1, best


def test_an_explicit_number_of_replicas_stays() -> None:
    case, space = case_of(
        nodes=5, layout={"trainer": {"nodes": 4, "replicate": 2, "context_parallel": "auto"}}
    )
    best = search(case, space).best
    assert best is not None and best.choice.replicate == 2


def test_in_flight_auto_is_a_number_that_the_kv_caches_hold() -> None:
    case, space = case_of(rollouts={"max_in_flight": "auto"})
    best = search(case, space).best
    assert best is not None
    room = best.figures["kv.concurrency"].value * best.choice.num_engines
    assert 8 <= best.choice.max_in_flight <= max(room, 8)
    assert best.choice.max_in_flight % 8 == 0


def test_a_single_node_is_split_between_engines_and_ranks() -> None:
    case, space = case_of(nodes=1)
    best = search(case, space).best
    assert best is not None
    assert best.choice.num_engines + best.choice.trainer_ranks <= 8
    assert best.choice.shares_node
    profile = load_profile("h100x64", overrides=["nodes=1"]).profile
    plan = compile_plan(apply_choice(case.recipe, best.choice), profile, run_dir="/r", python="python")
    assert choice_of(plan.phase("main")) == best.choice


def test_five_hundred_layouts_and_a_plan_of_1024_gpus_are_fast() -> None:
    """500 layouts in 2 s and 1,024 GPUs in 3 s on a quiet core, 1 s without simulation: doubled here for a busy one."""
    case, space = case_of(MIXTURE, **AUTO)
    started = time.process_time()
    num_layouts = search(case, space).num_layouts
    assert num_layouts >= 500
    assert (time.process_time() - started) / num_layouts < 2 * 2.0 / 500
    case, space = case_of(nodes=128)
    started = time.process_time()
    best = search(case, space).best
    assert best is not None
    assert time.process_time() - started < 2 * 3.0
    started = time.process_time()
    predict(case, best.choice, depth="closed_form")
    assert time.process_time() - started < 2 * 1.0
