"""Benchmarks of engines, orchestrator and loop: the recipes and plans that are measured, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import Kind, Role
from primerl_hpc.plan.bench_plans import (
    LoadRequest,
    LoopRequest,
    for_load,
    for_loop,
    with_idle_trainer,
    with_load,
)
from primerl_hpc.plan.plan import OnExit, Plan
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import parse_recipe
from primerl_hpc.recipe.schema.cross_checks import check_recipe
from primerl_hpc.recipe.schema.recipe import Recipe

RL: dict[str, Any] = {
    "kind": "rl",
    "name": "measured",
    "model": {"name": "owner/model"},
    "seq_len": 128,
    "max_steps": 1000,
    "environments": {"train": [{"id": "reverse-text"}], "eval": [{"id": "nim"}]},
    "rollouts": {"batch_size": 16, "group_size": 4, "sampling": {"max_tokens": 32}},
    "tracking": {"wandb": {"project": "p"}},
    "stop_when": {"metric": "reward/mean", "at_least": 0.9},
    "layout": {"inference": {"replicas": 1}, "trainer": {"ranks": 2}},
}
LOOP = LoopRequest(has_trainer=True, is_synthetic=True)


def rl(**changes: Any) -> Recipe:
    return parse_recipe({**RL, **changes})


def plan_of(recipe: Recipe) -> Plan:
    return compile_plan(recipe, load_profile("local").profile, run_dir="/r", python="/python")


def test_engines_are_measured_without_what_they_do_not_need_by_a_process_whose_exit_ends_the_run() -> None:
    recipe = for_load(rl(lora={"rank": 4}))
    check_recipe(recipe)
    assert (recipe.kind, recipe.environments.train, recipe.tracking.targets) == (Kind.INFERENCE, (), ())
    assert recipe.policy_name == "owner/model"
    (phase,) = with_load(plan_of(recipe)).phases
    assert [process.role for process in phase.processes] == [Role.INFERENCE, Role.ROUTER, Role.EVALUATOR]
    load = phase.process("evaluator-0")
    assert load.argv == ("/python", "-m", "primerl_hpc.roles.load", "/r", "main", "evaluator-0")
    assert load.on_exit == OnExit.ENDS_PHASE and load.nodes == phase.process("router-0").nodes


def test_a_loop_has_a_few_steps_and_writes_no_checkpoint_and_no_evaluation() -> None:
    recipe = for_loop(rl(), LoopRequest(has_trainer=True, is_synthetic=True, output_tokens=20, steps=3))
    check_recipe(recipe)
    assert (recipe.steps, recipe.checkpoint.interval, recipe.checkpoint.at_end) == (5, None, False)
    assert recipe.stop_when is None and recipe.tracking.targets == () and recipe.environments.eval == ()
    (environment,) = recipe.environments.train
    assert environment.id == "synthetic-rollouts"
    assert recipe.rollouts.sampling.max_tokens == 20
    assert recipe.rollouts.sampling.extra == {"ignore_eos": True}
    assert recipe.rollouts.max_off_policy_steps == rl().rollouts.max_off_policy_steps


def test_the_orchestrator_never_waits_for_a_version_and_packs_for_the_ranks_of_an_idle_trainer() -> None:
    request = LoopRequest(has_trainer=False, is_synthetic=False, warmup=1, steps=3)
    recipe = for_loop(rl(), request)
    check_recipe(recipe)
    assert recipe.rollouts.explicit_level == recipe.steps == 4
    assert [environment.id for environment in recipe.environments.train] == ["reverse-text"]
    (phase,) = with_idle_trainer(plan_of(recipe)).phases
    assert phase.num_data_ranks == 2
    assert phase.process("trainer-0").argv == ("/python", "-c", "import signal; signal.pause()")
    assert phase.process("orchestrator-0").argv[2] == "primerl_hpc.roles.orchestrator"


def test_recipes_without_the_measured_part_are_refused() -> None:
    sft = parse_recipe(
        {
            "kind": "sft",
            "name": "s",
            "model": {"name": "o/m"},
            "max_steps": 1,
            "sft": {"data": {"path": "x.jsonl"}},
        }
    )
    with pytest.raises(ConfigError, match="kind sft starts no engines"):
        for_load(sft)
    with pytest.raises(ConfigError, match="kind sft has no orchestrator"):
        for_loop(sft, LOOP)


def test_rollouts_that_do_not_fit_into_the_context_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="100 prompt tokens and 32 output tokens do not fit into 128 tokens"
    ):
        for_loop(rl(), LOOP.model_copy(update={"prompt_tokens": 100}))


@pytest.mark.parametrize("lengths", ["0", "9-3", "a", "", "1,,2"])
def test_lengths_have_a_valid_form(lengths: str) -> None:
    with pytest.raises(ValidationError, match="must have the form"):
        LoadRequest(prompt_tokens=lengths, output_tokens="1")


def test_a_level_has_enough_requests_for_its_load() -> None:
    request = LoadRequest(prompt_tokens="1", output_tokens="1")
    assert [request.num_requests(level, is_open=False) for level in (1, 32)] == [16, 128]
    assert [request.num_requests(level, is_open=True) for level in (0.1, 5)] == [16, 100]
    assert request.model_copy(update={"requests": 3}).num_requests(32, is_open=False) == 3
