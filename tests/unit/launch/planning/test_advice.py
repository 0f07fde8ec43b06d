"""Plans with another split of the same nodes, and the runs for which the advisor has none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.files import append_json, read_json, write_json, write_text
from primerl_hpc.common.names import Role
from primerl_hpc.launch.planning.advice import advice_for, min_trainer_units, refresh, replan, shape_of
from primerl_hpc.plan.plan import Plan, load_plan
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.plan.simulation.advisor import UnitSplit
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.job.auto_split import apply_advised_split
from tests.support.rated_split import metrics, speed

NODES = ("layout.inference={nodes: 3, replicas: auto}", "layout.trainer={nodes: 1, ranks: auto}")


def planned(profile: Profile, *overrides: str) -> Plan:
    recipe = load_recipe("reverse_text/tiny", overrides=["warmup=null", *overrides]).recipe
    return compile_plan(recipe, profile, run_dir="/runs/x", python="/venv/bin/python")


def profile(name: str = "virtual", *settings: str) -> Profile:
    return load_profile(name, overrides=["software.default.python=/venv/bin/python", *settings]).profile


def test_a_plan_of_the_same_split_is_the_same_plan() -> None:
    before = planned(profile(), *NODES)
    after = replan(before, profile(), UnitSplit(3, 1))
    assert after.phases[-1].processes == before.phases[-1].processes
    assert after.nodes == before.nodes


@pytest.mark.parametrize("split", [UnitSplit(2, 2), UnitSplit(1, 3)])
def test_another_split_uses_the_same_nodes_with_the_same_engines_per_node(split: UnitSplit) -> None:
    after = replan(planned(profile(), *NODES), profile(), split)
    shape = shape_of(after)
    assert shape is not None and shape.split == split and len(after.nodes) == 4
    phase = after.phases[-1]
    assert len(phase.of_role(Role.INFERENCE)) == 2 * split.engines
    (trainer,) = phase.of_role(Role.TRAINER)
    assert len(trainer.nodes) == split.trainer and trainer.accelerators == (0, 1)
    # the recipe that roles read has the new layout, and a second change starts from it
    assert phase.recipe.layout.trainer.nodes == split.trainer
    again = replan(after, profile(), UnitSplit(3, 1))
    assert again.phases[-1].processes == planned(profile(), *NODES).phases[-1].processes


def test_accelerators_of_a_single_node_are_split_too() -> None:
    local = profile("local", "node.cpu_slots=4")
    before = planned(local, "layout.inference.replicas=3", "layout.trainer.ranks=1")
    shape = shape_of(before)
    assert shape is not None and (shape.split, shape.unit) == (UnitSplit(3, 1), "accelerator")
    after = shape_of(replan(before, local, UnitSplit(2, 2)))
    assert after is not None and after.split == UnitSplit(2, 2)


TYPES = "node_types.l40s={nodes: 4, gpus: 8, gpu: L40S}"


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("virtual", ["kind=sft", "sft={data: {path: data.jsonl}}"]),
        ("virtual", ["layout.inference={elastic: true, replicas: 2}"]),
        (
            "h100x64",
            ["layout.inference={nodes: 2, replicas: auto, node_type: l40s}", "layout.trainer.nodes=2"],
        ),
    ],
    ids=["sft", "elastic", "two types of nodes"],
)
def test_runs_whose_nodes_cannot_be_exchanged_have_no_split(name: str, overrides: list[str]) -> None:
    assert shape_of(planned(profile(name, *([TYPES] if name == "h100x64" else [])), *overrides)) is None


def test_a_split_that_the_recipe_does_not_allow_is_refused() -> None:
    """A replicated trainer needs an even number of ranks for each replica."""
    even = (
        "layout.inference={nodes: 2, replicas: auto}",
        "layout.trainer={nodes: 2, ranks: 2, replicate: 2}",
    )
    with pytest.raises(ConfigError):
        replan(planned(profile(), *even), profile(), UnitSplit(3, 1))


def test_the_advice_follows_the_metrics_of_the_attempt() -> None:
    settings = ("rollouts.batch_size=16", "rollouts.group_size=4", "rollouts.max_in_flight=32")
    plan = planned(profile(), *NODES, *settings, "rollouts.max_off_policy_steps=2")
    trainer, orchestrator = metrics(6, 1, speed(6, 1)[2].step_s)
    rows = {"trainer": [{**trainer, "attempt": 1}] * 8, "orchestrator": [{**orchestrator, "attempt": 1}] * 8}
    advice = advice_for(plan, profile(), rows)
    assert advice is not None and advice.is_advised and advice.best.trainer > 1 and advice.gain > 1.5
    assert advice_for(plan, profile(), {}) is None


def test_a_trainer_keeps_the_nodes_that_its_measured_memory_needs() -> None:
    split, h100 = UnitSplit(4, 4), profile("h100x64").node
    assert min_trainer_units(split, h100, [{"perf/peak_memory": 30.0}]) == 2
    assert min_trainer_units(split, h100, [{"perf/peak_memory": 79.0}]) == 4
    assert min_trainer_units(split, h100, []) == 4  # not measured
    assert min_trainer_units(split, profile().node, []) == 1  # CPUs


def test_the_memory_of_the_trainers_node_type_limits_the_advice() -> None:
    """GPUs of the profile's `node` have 80 GiB, those of the trainer's nodes 48: it cannot give a node away."""
    types = "node_types.l40s={nodes: 4, gpus: 8, gpu: L40S, gpu_memory_gib: 48}"
    mixed = profile("h100x64", types)
    roles = ("layout.inference={nodes: 2, replicas: auto, node_type: l40s}", "layout.trainer.node_type=l40s")
    settings = ("rollouts.batch_size=16", "rollouts.group_size=4", "rollouts.max_in_flight=32")
    plan = planned(mixed, *roles, "layout.trainer.nodes=2", *settings)
    trainer, orchestrator = metrics(1, 6, speed(1, 6)[2].step_s)
    trainer |= {"perf/peak_memory": 35.0}
    rows = {"trainer": [{**trainer, "attempt": 1}] * 8, "orchestrator": [{**orchestrator, "attempt": 1}] * 8}
    advice = advice_for(plan, mixed, rows)
    assert advice is not None and advice.best.trainer >= 2


@pytest.fixture
def measured(tmp_path: Path) -> RunDir:
    """A run whose first attempt measured that its trainer needs more nodes."""
    settings = ("rollouts.batch_size=16", "rollouts.group_size=4", "rollouts.max_in_flight=32")
    plan = planned(profile(), *NODES, *settings, "rollouts.max_off_policy_steps=2", "layout.auto_split=true")
    run = RunDir(tmp_path)
    write_text(run.profile, load_profile("virtual").text)
    write_json(run.plan, plan.model_dump(mode="json"))
    write_json(run.state, {"attempt": 1, "state": "running"})
    for name, row in zip(("trainer", "orchestrator"), metrics(6, 1, speed(6, 1)[2].step_s), strict=True):
        for step in range(1, 9):
            append_json(run.metrics(name), {**row, "attempt": 1, "step": step})
    return run


def test_the_advice_is_shown_while_the_run_is_running_and_the_plan_stays(measured: RunDir) -> None:
    before = measured.plan.read_bytes()
    refresh(measured)
    advice = read_json(measured.advice)
    assert advice["attempt"] == 1 and not advice["is_applied"] and "instead of" in advice["sentence"]
    assert measured.plan.read_bytes() == before


def test_the_supervisor_of_the_next_attempt_runs_the_advised_split(measured: RunDir) -> None:
    write_json(measured.attempt_plan(1), read_json(measured.plan))  # as the attempt keeps it
    outcome = asyncio.run(apply_advised_split(measured))
    assert "instead of" in outcome["sentence"]
    shape = shape_of(load_plan(measured))
    assert shape is not None and shape.split.trainer > 1
    refresh(measured)
    assert read_json(measured.advice)["is_applied"]


def test_a_split_that_cannot_be_computed_leaves_the_plan(measured: RunDir) -> None:
    measured.profile.unlink()
    before = measured.plan.read_bytes()
    assert "profile.yaml" in asyncio.run(apply_advised_split(measured))["refused"]
    assert measured.plan.read_bytes() == before
