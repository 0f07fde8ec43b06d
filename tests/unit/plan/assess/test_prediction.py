"""Figures, verdicts, remedies and rules of thumb."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import ConfigError, NotFoundError
from primerl_hpc.plan.assess.case import make_case
from primerl_hpc.plan.assess.choice import LayoutChoice, choice_of
from primerl_hpc.plan.assess.prediction import predict
from primerl_hpc.plan.assess.remedy import smallest_change
from primerl_hpc.plan.assess.rules import rules_of_thumb
from primerl_hpc.plan.assess.search import Space
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.plan.predict.hardware import gpu_spec
from primerl_hpc.plan.predict.shape import known_shape
from primerl_hpc.plan.simulation.lengths import Lengths
from primerl_hpc.recipe.load import parse_recipe
from primerl_hpc.recipe.schema.recipe import Recipe
from tests.unit.plan.assess.test_search import case_of, recipe_of

CHOICE = LayoutChoice(
    num_engines=48,
    tensor_parallel=1,
    data_parallel=1,
    expert_parallel=False,
    trainer_ranks=16,
    ranks_per_node=8,
    max_in_flight=512,
    engine_nodes=6,
    trainer_nodes=2,
)
LARGE = "Qwen/Qwen3-32B"


def test_a_prediction_has_every_figure_of_the_screen_with_interval_and_formula() -> None:
    case, _ = case_of()
    prediction = predict(case, CHOICE)
    assert prediction.fits and not prediction.absent
    names = (
        "memory.trainer memory.engine kv.tokens kv.concurrency time.step time.trainer.step time.engine.decode"
    )
    names += " time.weight_update idle.trainer idle.engines staleness.mean rate.tokens run.gpu_hours checkpoint.size"
    for name in names.split():
        figure = prediction.figures[name]
        assert 0 <= figure.low <= figure.value <= figure.high
        assert figure.formula
    assert prediction.figures["time.step"].low < prediction.figures["time.step"].high
    hours = prediction.figures["time.step"].value * 100 * 64 / 3600
    assert prediction.figures["run.gpu_hours"].value == pytest.approx(hours)


def test_gpu_hours_count_the_gpus_of_each_node_type() -> None:
    case, _ = case_of()
    case = replace(case, engine_node=case.engine_node.model_copy(update={"gpus": 4}))
    assert predict(case, CHOICE).figure("run.gpus").value == 6 * 4 + 2 * 8


@pytest.mark.parametrize(
    ("gpu", "sequences", "tokens"),
    [("H100-SXM", 1024, 8192), ("A100-SXM-80GB", 256, 2048), ("L40S", 256, 2048)],
)
def test_engines_have_vllms_limits_of_their_gpu_unless_the_recipe_sets_them(gpu, sequences, tokens) -> None:
    case, _ = case_of()
    setup = replace(case, engine_gpu=gpu_spec(gpu)).engine_setup(CHOICE)
    assert (setup.max_num_seqs, setup.max_num_batched_tokens) == (sequences, tokens)
    chosen = {"max-num-seqs": 64, "max_num_batched_tokens": 4096}
    case, _ = case_of(inference={"extra_args": chosen})
    setup = replace(case, engine_gpu=gpu_spec(gpu)).engine_setup(CHOICE)
    assert (setup.max_num_seqs, setup.max_num_batched_tokens) == (64, 4096)


def test_why_finds_inputs_of_figures_and_lists_the_known_names() -> None:
    case, _ = case_of()
    prediction = predict(case, CHOICE)
    assert prediction.figure("time.trainer.step.matmuls").value > 0
    with pytest.raises(NotFoundError, match=r"no figure 'memory\.traner'") as caught:
        prediction.figure("memory.traner")
    assert caught.value.hint.startswith("did you mean memory.trainer or ")
    assert "time.step" in caught.value.hint and "time.trainer.step.matmuls" not in caught.value.hint


def test_the_simulated_step_is_never_faster_than_the_closed_form() -> None:
    case, _ = case_of()
    ideal = predict(case, CHOICE, depth="closed_form").figures["time.step"].value
    assert predict(case, CHOICE).figures["time.step"].value >= 0.97 * ideal


def test_an_engine_that_does_not_fit_is_a_misfit_and_tensor_parallelism_the_remedy() -> None:
    case, space = case_of(LARGE)
    prediction = predict(case, CHOICE)
    assert [misfit.role for misfit in prediction.misfits if misfit.role == "engines"]
    assert "time.step" not in prediction.figures
    change = smallest_change(case, prediction, space)
    assert change is not None
    assert "layout.inference.tensor_parallel to 2" in str(change)
    assert predict(case, change.choice).fits


def test_a_trainer_that_does_not_fit_gets_the_first_change_that_fits() -> None:
    case, space = case_of("meta-llama/Llama-3.1-70B-Instruct")
    small = LayoutChoice(
        **{**vars(CHOICE), "num_engines": 12, "tensor_parallel": 4, "trainer_ranks": 8, "trainer_nodes": 1}
    )
    prediction = predict(case, small)
    assert [misfit.role for misfit in prediction.misfits] == ["trainer"]
    assert "GiB" in str(prediction.misfits[0])
    change = smallest_change(case, prediction, space)
    assert change is not None and predict(case, change.choice).fits


def test_saves_in_the_background_are_given_up_if_the_host_has_no_room_for_their_copy() -> None:
    layout = {"inference": {"replicas": 1, "tensor_parallel": 4}, "trainer": {"ranks": 4}}
    options = {"optimizer": {"type": "muon"}, "checkpoint": {"interval": 25}, "layout": layout}
    name, profile = "zai-org/GLM-4.5-Air", load_profile("h200x8").profile
    case = make_case(recipe_of(name, **options), profile, known_shape(name))
    choice = replace(
        CHOICE, num_engines=1, tensor_parallel=4, trainer_ranks=4, ranks_per_node=4, shares_node=True
    )
    choice = replace(choice, engine_nodes=1, trainer_nodes=1)
    change = smallest_change(case, predict(case, choice), Space(1, 8))
    assert change is not None and change.choice.cpu_offload
    assert change.values[-1] == ("checkpoint.asynchronous", "false")


def test_a_change_names_every_key_that_its_layout_needs() -> None:
    """The recipe with these keys has the layout for which the change was found to fit."""
    profile = load_profile("h100x64").profile

    def placed(recipe: Recipe) -> LayoutChoice:
        return choice_of(compile_plan(recipe, profile, run_dir="/r", python="python").phase("main"))

    for nodes, options in [
        (2, {"activation_checkpointing": "none"}),
        (2, {"activation_checkpointing": "none", "optimizer_offload": True}),
        (1, {"activation_checkpointing": "none"}),
    ]:
        layout = {
            "inference": {"nodes": 8 - nodes, "replicas": 2 * (8 - nodes), "tensor_parallel": 4},
            "trainer": {"nodes": nodes, "ranks": 8 * nodes},
        }
        case, space = case_of("meta-llama/Llama-3.1-70B-Instruct", layout=layout, trainer=options)
        prediction = predict(case, placed(case.recipe))
        assert {misfit.role for misfit in prediction.misfits} == {"trainer"}
        change = smallest_change(case, prediction, space)
        assert change is not None
        values = case.recipe.model_dump(mode="json", exclude_unset=True)
        for key, value in change.values:
            *blocks, name = key.split(".")
            block = values
            for part in blocks:
                block = block.setdefault(part, {})
            block[name] = yaml.safe_load(value)
        assert placed(parse_recipe(values)) == change.choice


def test_no_change_makes_an_absurd_plan_fit() -> None:
    case, _ = case_of("moonshotai/Kimi-K2-Instruct", nodes=2)
    choice = LayoutChoice(
        **{**vars(CHOICE), "num_engines": 8, "engine_nodes": 1, "trainer_ranks": 8, "trainer_nodes": 1}
    )
    prediction = predict(case, choice)
    assert {misfit.role for misfit in prediction.misfits} == {"engines", "trainer"}
    assert smallest_change(case, prediction, Space(2, 8)) is None


def test_lengths_are_measured_expected_or_marked_as_assumed() -> None:
    profile, shape = load_profile("h100x64").profile, known_shape("Qwen/Qwen3-8B")
    expected = make_case(recipe_of(), profile, shape)
    assert expected.completion.value == 2000 and not expected.is_assumed
    assumed = make_case(recipe_of(rollouts={"expected": {}}), profile, shape)
    assert assumed.is_assumed
    assert assumed.completion.value == 4096
    assert assumed.completion.low < assumed.completion.value < assumed.completion.high
    assert "rollouts.expected" in predict(assumed, CHOICE).assumptions[0]
    measured = make_case(recipe_of(), profile, shape, lengths=Lengths.constant(700), lengths_source="run a")
    assert measured.completion.value == 700 and not predict(measured, CHOICE).assumptions
    in_fp8 = make_case(recipe_of(trainer={"fp8": "blockwise"}), profile, shape)
    (assumption,) = predict(in_fp8, CHOICE).assumptions
    assert assumption.startswith("products in FP8 (trainer.fp8)")
    steps = [predict(case, CHOICE).figures["time.trainer.step"].value for case in (in_fp8, expected)]
    assert steps[0] < steps[1]


def test_batches_by_tokens_and_the_lead_of_the_orchestrator_are_predicted() -> None:
    case, _ = case_of(rollouts={"batch_tokens": 1_000_000, "async_level": 2})
    mean = case.prompt.value + case.completion.value
    size = case.recipe.rollouts.group_size
    assert case.batch_size == round(1_000_000 / mean / size) * size != case.recipe.rollouts.batch_size
    workload = case.workload(CHOICE)
    assert (workload.batch_size, workload.max_lead) == (case.batch_size, 2)
    inputs = predict(case, CHOICE).figures["time.step"].inputs
    assert (inputs["batch_size"], inputs["async_level"]) == (case.batch_size, 2)


def test_profiles_without_gpus_and_unknown_gpus_are_refused_by_name() -> None:
    shape = known_shape("Qwen/Qwen3-8B")
    with pytest.raises(ConfigError, match="profile 'local' has no GPUs"):
        make_case(recipe_of(), load_profile("local").profile, shape)
    unknown = load_profile("h100x64", overrides=["node.gpu=TX-9000"]).profile
    with pytest.raises(ConfigError, match="unknown GPU type 'TX-9000'"):
        make_case(recipe_of(), unknown, shape)
    unnamed = load_profile("h100x64", overrides=["node.gpu=null"]).profile
    with pytest.raises(ConfigError, match="does not name the GPU type"):
        make_case(recipe_of(), unnamed, shape)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rollouts": {"batch_size": 32}}, "batch_size 32 is below 64"),
        ({"rollouts": {"group_size": 4}}, "group_size 4 is below 8"),
        ({"rollouts": {"max_in_flight": 128}}, "max_in_flight 128 is below batch_size 256"),
        ({"seq_len": 8192}, "max_tokens 8192 does not fit into seq_len 8192"),
        ({"rollouts": {"max_off_policy_steps": 0}}, "rollouts.max_off_policy_steps 0 is synchronous"),
        ({"rollouts": {"async_level": 0}}, "rollouts.async_level 0 is synchronous"),
        ({"checkpoint": {"interval": 2000}}, "longer than the walltime of 1.0 h"),
        ({"rollouts": {"max_in_flight": 100_000}}, "KV caches hold about"),
    ],
)
def test_each_rule_of_thumb_is_one_warning_with_a_reason(changes: dict, expected: str) -> None:
    if changes.get("seq_len"):
        changes = changes | {"inference": {"max_model_len": 16_384}}
    case, _ = case_of(**changes)
    choice = LayoutChoice(**{**vars(CHOICE), "max_in_flight": case.recipe.rollouts.in_flight_ceiling})
    found = rules_of_thumb(case.recipe, predict(case, choice), walltime_s=3600)
    assert [text for text in found if expected in text], found


def test_many_discarded_rollouts_are_a_warning() -> None:
    case, _ = case_of()
    prediction = predict(case, CHOICE)
    assert prediction.run is not None
    for discarded, is_broken in ((0.19, False), (0.31, True)):
        changed = replace(prediction, run=replace(prediction.run, discarded=discarded))
        found = rules_of_thumb(case.recipe, changed)
        assert ["31% of the rollouts become too old" in text for text in found] == [True] * is_broken


def test_a_trainer_whose_interval_exceeds_the_gpu_is_a_warning() -> None:
    case, _ = case_of(LARGE, seq_len=35_840)
    choice = replace(CHOICE, tensor_parallel=4, num_engines=12)
    prediction = predict(case, choice)
    assert prediction.fits
    expected = "the trainer's memory may not suffice: predicted 78.5 GiB a GPU, up to 81.7 of 79.2"
    assert expected in rules_of_thumb(case.recipe, prediction)


def test_elastic_engines_cost_the_gpus_of_their_jobs() -> None:
    layout = {"inference": {"elastic": True, "replicas": 5, "tensor_parallel": 2}, "trainer": {"nodes": 2}}
    case, _ = case_of(layout=layout)
    profile = load_profile("h100x64").profile
    plan = compile_plan(case.recipe, profile, run_dir="/r", python="python")
    choice = choice_of(plan.phase("main"))
    assert (choice.engine_nodes, choice.shares_node) == (5, False)
    assert predict(case, choice).figure("run.gpus").value == 5 * 2 + 2 * 8


def test_the_rate_of_the_engines_includes_what_no_batch_uses() -> None:
    case, _ = case_of(
        rollouts={"max_off_policy_steps": 1, "expected": {"completion_tokens": 2000, "cv": 2.0}}
    )
    prediction = predict(case, CHOICE)
    assert prediction.run is not None and prediction.run.discarded > 0.02
    assert prediction.figures["rate.engines"].value > 1.02 * prediction.figures["rate.tokens"].value


def test_a_sensible_recipe_breaks_no_rule() -> None:
    case, _ = case_of()
    assert rules_of_thumb(case.recipe, predict(case, CHOICE), walltime_s=24 * 3600) == []
