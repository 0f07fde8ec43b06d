"""``auto`` without a prediction: the rules of a CPU profile."""

from __future__ import annotations

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.plan.assess.settle import settle_auto
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import parse_recipe

MINIMAL = {
    "kind": "rl",
    "name": "x",
    "model": {"name": "Qwen/Qwen3-0.6B"},
    "max_steps": 4,
    "environments": {"train": [{"id": "reverse-text"}]},
}
AUTO = {
    "layout": {"inference": {"tensor_parallel": "auto", "data_parallel": "auto", "expert_parallel": "auto"}},
    "trainer": {
        "activation_checkpointing": "auto",
        "activation_offload": "auto",
        "optimizer_offload": "auto",
        "cpu_offload": "auto",
    },
    "rollouts": {"max_in_flight": "auto"},
}


def test_a_cpu_profile_settles_every_auto_and_notes_it() -> None:
    profile = load_profile("local").profile
    plan = compile_plan(parse_recipe(MINIMAL | AUTO), profile, run_dir="/r", python="python")
    recipe = plan.phase("main").recipe
    plain = compile_plan(parse_recipe(MINIMAL), profile, run_dir="/r", python="python").phase("main").recipe
    assert recipe == plain
    note = next(note for note in plan.notes if note.startswith("auto without a prediction"))
    for key in (
        "layout.inference.tensor_parallel 1",
        "trainer.cpu_offload false",
        "rollouts.max_in_flight null",
    ):
        assert key in note


def test_a_recipe_without_auto_stays_the_same_and_gets_no_note() -> None:
    recipe = parse_recipe(MINIMAL)
    assert settle_auto(recipe) == (recipe, ())


def test_expert_parallel_follows_the_data_parallel_ranks_of_an_engine() -> None:
    layout = {"inference": {"data_parallel": 4, "expert_parallel": "auto"}}
    settled, _ = settle_auto(parse_recipe(MINIMAL | {"layout": layout}))
    assert settled.layout.inference.expert_parallel is True
