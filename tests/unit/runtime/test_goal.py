"""The supervisor ends a run whose metric has reached its value (``stop_when``) or whose hours are used (`--budget`)."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from primerl_hpc.common.errors import ConfigError, ExitCode
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.launch.planning.hour_budget import check_budget, with_budget
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.plan.types import HourBudget, OnExit, load_plan
from primerl_hpc.run.ledger.attempts import used_s
from tests.support.helpers import make_plan, process_plan
from tests.unit.runtime.test_supervisor import (
    TOY_RECIPE,
    UNTIL_STOPPED,
    Toy,
    toy,  # noqa: F401 - a fixture
)


def test_a_run_whose_metric_reached_its_goal_saves_and_is_done(toy: Toy) -> None:  # noqa: F811
    """The value must be reached twice in a row: at steps 3 and 4, not at 1 alone."""
    toy.recipe = TOY_RECIPE | {"stop_when": {"metric": "reward/mean", "at_least": 0.5, "for": 2}}
    rows = """
    import sys
    from pathlib import Path
    from primerl_hpc.run.metrics import MetricsWriter
    from primerl_hpc.run.rundir import RunDir
    run = RunDir(Path(sys.argv[1]))
    writer = MetricsWriter(run.metrics("orchestrator"))
    for step, reward in ((1, 0.6), (2, 0.2), (3, 0.5), (4, 0.7)):
        writer.write(step, {"reward/mean": reward})
    """
    toy.add(Role.TRAINER, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.add(Role.ORCHESTRATOR, textwrap.dedent(rows) + textwrap.dedent(UNTIL_STOPPED), OnExit.ENDS_PHASE)
    toy.start()
    assert toy.end() == ExitCode.DONE
    assert take_snapshot(toy.run).state == RunState.DONE
    (request,) = toy.events("stop_requested")
    assert request["reason"] == "goal"


def test_a_run_stops_before_its_budget_is_used_and_is_not_resumed_without_a_larger_one(
    toy: Toy,  # noqa: F811
) -> None:
    toy.add(Role.TRAINER, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    plan = make_plan(toy.run.root, toy.recipe, processes=toy.processes)
    toy.start(plan.model_copy(update={"budget": HourBudget(text="3nodeh", job_s=2.0)}))
    assert toy.end() == ExitCode.STOPPED
    (request,) = toy.events("stop_requested")
    assert request["reason"] == "budget" and used_s(toy.run) > 0
    spent = HourBudget(text="3nodeh", job_s=used_s(toy.run))
    for same in (load_plan(toy.run), load_plan(toy.run).model_copy(update={"budget": spent})):
        with pytest.raises(ConfigError, match=r"used its budget of 3nodeh .*resume run --budget"):
            check_budget(toy.run, same)
    larger = with_budget(load_plan(toy.run), "4 nodeh")
    assert larger.budget is not None and larger.budget.job_s == 4 * 3600
    check_budget(toy.run, larger)


@pytest.mark.parametrize("text", ["500", "0GPUh", "-3GPUh", "500GPU", "many"])
def test_a_budget_that_is_not_a_number_of_hours_is_refused(tmp_path: Path, text: str) -> None:
    plan = make_plan(tmp_path, TOY_RECIPE, processes=[process_plan(Role.TRAINER)], accelerator="gpu")
    with pytest.raises(ConfigError, match="500GPUh"):
        with_budget(plan, text)


def test_a_budget_counts_all_gpus_and_spare_nodes_of_the_plan(tmp_path: Path) -> None:
    processes = [process_plan(Role.TRAINER, nodes=3, accelerators=4)]
    plan = make_plan(tmp_path, TOY_RECIPE, processes=processes, accelerator="gpu")
    plan = plan.model_copy(update={"spare_nodes": 1})
    for text, hours in (("32GPUh", 2.0), ("8nodeH", 2.0)):
        assert (budget := with_budget(plan, text).budget) is not None and budget.job_s == hours * 3600
    with pytest.raises(ConfigError, match="uses no GPUs"):
        with_budget(plan.model_copy(update={"accelerator": "cpu"}), "32GPUh")
