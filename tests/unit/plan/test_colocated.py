"""Engines and trainer on the same accelerators: where they are placed, what must fit, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from primerl_hpc.checks.recipe.model_config import read_model
from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import Role
from primerl_hpc.launch.planning.advice import shape_of
from primerl_hpc.launch.planning.forecast import decide_auto, forecast_plan, refuse_misfit
from primerl_hpc.plan.assess.case import make_case
from primerl_hpc.plan.assess.choice import choice_of
from primerl_hpc.plan.assess.prediction import Prediction, predict
from primerl_hpc.plan.plan import PhasePlan, Plan
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.plan.predict.shape import known_shape
from tests.unit.plan.assess.test_search import recipe_of

SMALL, EIGHT_B, LARGE = "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B"
ONE_GPU = {"inference": {"replicas": 1}, "trainer": {"ranks": 1}}


def plan_of(layout: dict[str, Any], model: str = SMALL, *, nodes: int = 2) -> Plan:
    profile = load_profile("h100x64", overrides=[f"nodes={nodes}"]).profile
    return compile_plan(recipe_of(model, layout=layout), profile, run_dir="/runs/x", python="python")


def placed(phase: PhasePlan, role: Role) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(process.nodes, process.accelerators) for process in phase.of_role(role)]


@pytest.mark.parametrize(
    ("layout", "engines", "trainer"),
    [
        (ONE_GPU, [((0,), (0,))], ((0,), (0,))),
        ({"trainer": {"ranks": 4}, "inference": {"tensor_parallel": 2}},
         [((0,), (0, 1)), ((0,), (2, 3))], ((0,), (0, 1, 2, 3))),
        ({"trainer": {"nodes": 2}, "inference": {"tensor_parallel": 8}},
         [((0,), tuple(range(8))), ((1,), tuple(range(8)))], ((0, 1), tuple(range(8)))),
    ],
)  # fmt: skip
def test_engines_and_trainer_use_the_same_gpus(layout: Any, engines: Any, trainer: Any) -> None:
    plan = plan_of(layout | {"colocated": True})
    (phase,) = plan.phases
    assert placed(phase, Role.INFERENCE) == engines and placed(phase, Role.TRAINER) == [trainer]
    assert len(plan.nodes) == len(trainer[0])
    choice = choice_of(phase)
    assert choice.is_colocated and choice.gpus == len(trainer[0]) * len(trainer[1])
    assert " on the GPUs of " in str(choice)
    assert shape_of(plan) is None, "the split advisor has nothing to exchange"


def test_without_counts_both_sides_use_every_gpu_of_the_profile() -> None:
    (phase,) = plan_of({"colocated": True}).phases
    assert placed(phase, Role.TRAINER) == [((0, 1), tuple(range(8)))]
    assert len(phase.of_role(Role.INFERENCE)) == 16


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({"inference": {"tensor_parallel": 16}}, "an engine of 16 accelerators exceeds a node"),
        ({"trainer": {"ranks": 1}, "inference": {"replicas": 2}}, "2 engines of 1 accelerators do not fit"),
        ({"trainer": {"ranks": 1}, "inference": {"tensor_parallel": 2}}, "1 engine of 2 accelerators do not"),
        ({"trainer": {"nodes": 3}}, "the recipe requires 3 nodes"),
    ],
)
def test_what_does_not_fit_on_the_trainers_accelerators_is_refused(layout: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan_of(layout | {"colocated": True})


def test_a_waiting_engine_has_the_time_of_a_turn_in_addition_to_its_start() -> None:
    timeouts = recipe_of().timeouts
    for colocated, limit_s in (
        (True, timeouts.inference_ready_s + timeouts.weights_s),
        ({"mode": "share"}, timeouts.inference_ready_s),
    ):
        (engine,) = plan_of(ONE_GPU | {"colocated": colocated}).phases[0].of_role(Role.INFERENCE)
        assert engine.ready_timeout_s == limit_s


def prediction_of(model: str, colocated: Any, **more: Any) -> Prediction:
    profile = load_profile("h100x64", overrides=["nodes=1"]).profile
    recipe = recipe_of(model, layout={**ONE_GPU, "colocated": colocated}, **more)
    phase = compile_plan(recipe, profile, run_dir="/runs/x", python="python").phases[0]
    return predict(make_case(recipe, profile, known_shape(model)), choice_of(phase))


def test_in_turns_each_side_may_use_what_the_other_leaves_while_it_waits() -> None:
    prediction = prediction_of(SMALL, True)
    gpu = 79.2 * 2**30
    assert prediction.fits
    assert 0.8 * gpu < prediction.limits["memory.engine"] <= 0.9 * gpu + 2**30
    assert gpu - 3 * 2**30 < prediction.limits["memory.trainer"] < gpu
    both = prediction.figures["memory.trainer"].value + prediction.limits["memory.engine"]
    assert both > gpu, "the sum of both sides exceeds the GPU: they are not in memory together"
    separate = prediction_of_separate_gpus()
    assert prediction.run is not None and prediction.run.staleness_mean == 0
    step, parts = prediction.figures["time.step"].value, separate.figures
    assert step > max(parts["time.step"].value, parts["time.trainer.step"].value)
    assert 0 < prediction.figures["time.hand_over"].value < 5


def prediction_of_separate_gpus() -> Prediction:
    profile = load_profile("h100x64", overrides=["nodes=1"]).profile
    recipe = recipe_of(SMALL, layout=ONE_GPU)
    phase = compile_plan(recipe, profile, run_dir="/runs/x", python="python").phases[0]
    return predict(make_case(recipe, profile, known_shape(SMALL)), choice_of(phase))


def test_fixed_shares_add_up_to_the_gpu_and_have_no_predicted_step() -> None:
    prediction = prediction_of(SMALL, {"mode": "share", "engine_share": 0.3})
    engine, trainer = prediction.limits["memory.engine"], prediction.limits["memory.trainer"]
    assert engine / (engine + trainer) == pytest.approx(0.3)
    assert "time.step" not in prediction.figures and "at the same time" in prediction.absent["time.step"]


def test_a_trainer_that_fits_in_turns_may_not_fit_in_a_share() -> None:
    assert prediction_of(SMALL, True).fits
    misfits = prediction_of(SMALL, {"mode": "share", "engine_share": 0.9}).misfits
    assert [misfit.role for misfit in misfits] == ["trainer"]


def test_states_that_wait_in_host_memory_must_fit_there() -> None:
    profile = load_profile(
        "h100x64", overrides=["nodes=1", "node.memory_gib=4", "node.host_memory_gib=null"]
    ).profile
    recipe = recipe_of(SMALL, layout={**ONE_GPU, "colocated": True})
    phase = compile_plan(recipe, profile, run_dir="/runs/x", python="python").phases[0]
    prediction = predict(make_case(recipe, profile, known_shape(SMALL)), choice_of(phase))
    assert [misfit.where for misfit in prediction.misfits] == ["a node's host memory"]


def test_auto_is_settled_by_rules_and_a_misfit_names_a_remedy() -> None:
    profile = load_profile("h100x64", overrides=["nodes=1"]).profile
    recipe = recipe_of(LARGE, layout={**ONE_GPU, "colocated": True}, trainer={"cpu_offload": "auto"})
    settled, notes = decide_auto(recipe, profile, read_model(recipe, profile))
    assert settled == recipe and "engines and trainer use the same GPUs" in notes[0]
    plan = compile_plan(settled, profile, run_dir="/runs/x", python="python")
    with pytest.raises(ConfigError, match="the plan does not fit: trainer needs") as refused:
        refuse_misfit(forecast_plan(plan, profile, read_model(recipe, profile)))
    assert "layout.colocated" in str(refused.value)


def test_a_warmup_runs_without_turns_and_the_main_phase_with_them() -> None:
    sft = {"sft": {"data": {"path": "/data/a.jsonl"}}, "max_steps": 2}
    profile = load_profile("h100x64", overrides=["nodes=1"]).profile
    recipe = recipe_of(SMALL, layout={**ONE_GPU, "colocated": True}, warmup=sft)
    warmup, main = compile_plan(recipe, profile, run_dir="/runs/x", python="python").phases
    assert not warmup.recipe.layout.takes_turns and main.recipe.layout.takes_turns
    assert warmup.processes[0].accelerators == main.of_role(Role.TRAINER)[0].accelerators == (0,)
