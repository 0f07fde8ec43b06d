"""``layout.auto_split`` on the virtual cluster: a chain that starts with a bad split of its nodes becomes faster.

Supervisor, chain, plan and SLURM are real. The roles take as long as the simulation returns for the split of their plan
(`tests/support/rated_split.py`).
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.document import dump_yaml
from primerl_hpc.common.files import read_json, read_jsonl, write_json, write_text
from primerl_hpc.common.names import RunState
from primerl_hpc.launch.compose import ChainRequest
from primerl_hpc.launch.planning.advice import shape_of
from primerl_hpc.plan.plan import load_plan
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.render.job import render_job
from tests.slurm.test_chain import warn_of_walltime
from tests.support import rated_split
from tests.support.helpers import ROOT, wait_for
from tests.support.virtual_slurm import SlurmToy, run_cli

STEPS = 8


def prepare(toy: SlurmToy, folder: Path, *overrides: str) -> None:
    """Write a run of the planner whose interpreter starts rated roles."""
    interpreter = folder / "rated-python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} {rated_split.__file__} "$@"\n')
    interpreter.chmod(0o755)
    settings = (f"software.default.python={interpreter}", "preflight.enabled=false", "scheduler.time=10")
    loaded = load_profile("virtual", overrides=settings)
    recipe = load_recipe(
        "reverse_text/tiny",
        overrides=[
            *("warmup=null", "evaluation=null", "environments.eval=[]", "recovery.in_place=false"),
            *("rollouts.batch_size=16", "rollouts.group_size=4", "rollouts.max_in_flight=32"),
            *("rollouts.max_off_policy_steps=2", "layout.inference={nodes: 3, replicas: auto}"),
            *("layout.trainer={nodes: 1, ranks: auto}", *overrides),
        ],
    ).recipe
    plan = compile_plan(recipe, loaded.profile, run_dir=str(toy.run.root), python=str(interpreter))
    for path in (toy.run.control, toy.run.launch, toy.run.attempt_logs(1), toy.run.root / "metrics"):
        path.mkdir(parents=True, exist_ok=True)
    write_text(toy.run.profile, dump_yaml(loaded.profile.model_dump(mode="json", exclude_unset=True)))
    write_json(toy.run.plan, plan.model_dump(mode="json"))
    script = render_job(plan, loaded.profile, python=sys.executable, package_root=str(ROOT))
    write_text(toy.run.job_script, script, mode=0o755)


def steps_of(toy: SlurmToy, attempt: int) -> list[float]:
    rows = [row for row in read_jsonl(toy.run.metrics("trainer")) if row.get("attempt") == attempt]
    return [row["time/step"] for row in rows]


@pytest.mark.slow
def test_a_bad_split_is_at_least_one_and_a_half_times_as_fast_within_three_links(
    new_toy: Callable[..., SlurmToy], tmp_path: Path
) -> None:
    toy = new_toy()
    prepare(toy, tmp_path, "layout.auto_split=true")
    toy.submit(ChainRequest(is_until_done=True))
    splits = []
    for attempt in (1, 2, 3):
        wait_for(lambda at=attempt: len(steps_of(toy, at)) >= STEPS, f"steps of {attempt}", tell=toy.words)
        splits.append(str(shape_of(load_plan(toy.run)).split))  # type: ignore[union-attr]
        if attempt < 3:
            warn_of_walltime(toy)
    (toy.run.root / "enough").touch()
    toy.wait_for_state(RunState.DONE)
    durations = [statistics.median(steps_of(toy, attempt)) for attempt in (1, 2, 3)]
    assert splits[0] == "3 for engines, 1 for the trainer" and splits[-1] != splits[0]
    assert durations[0] / min(durations[1:]) >= 1.5, (splits, durations)
    advice = [row for row in toy.events("split_advice") if row["applied"]]
    assert advice and "instead of 3 for engines, 1 for the trainer" in advice[0]["message"]
    # each attempt keeps the plan that it ran
    kept = [read_json(toy.run.attempt_plan(attempt)) for attempt in (1, 2)]
    assert [len(plan["nodes"]) for plan in kept] == [4, 4] and kept[0]["nodes"] != kept[1]["nodes"]
    shown = run_cli("status", str(toy.run.root)).stdout
    assert "split" in shown and "for the trainer" in shown
    toy.assert_nothing_is_left()
    if path := os.environ.get("AUTO_SPLIT_JSON"):
        write_json(
            Path(path), {"splits": splits, "step_s": durations, "advice": [a["message"] for a in advice]}
        )


@pytest.mark.slow
def test_without_auto_split_the_advice_is_shown_and_the_plan_stays(
    new_toy: Callable[..., SlurmToy], tmp_path: Path
) -> None:
    toy = new_toy()
    prepare(toy, tmp_path)
    before = toy.run.plan.read_bytes()
    toy.submit()
    wait_for(lambda: len(steps_of(toy, 1)) >= STEPS, "steps", tell=toy.words)
    (toy.run.root / "enough").touch()
    toy.wait_for_state(RunState.DONE)
    assert toy.run.plan.read_bytes() == before and not toy.events("split_advice")
    assert "instead of 3 for engines" in run_cli("status", str(toy.run.root)).stdout.replace("\n", " ")
