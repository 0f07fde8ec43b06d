"""The supervisor ends a run whose metric has reached its value (``stop_when``) or whose hours are used (`--budget`)."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import ConfigError, ExitCode
from primerl_hpc.common.files import append_json, write_json
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.launch.planning.hour_budget import check_budget, check_new_budget, why_too_small, with_budget
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.plan.components import allocated_gpus
from primerl_hpc.plan.plan import ComponentPlan, HourBudget, OnExit, load_plan
from primerl_hpc.run.ledger.attempts import BudgetStop, used_s
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
    assert request["reason"] == "budget" and request["budget_s"] == 2.0 and used_s(toy.run) > 0
    with pytest.raises(ConfigError, match=r"3nodeh, is used .*resume .*run --budget HOURS"):
        check_budget(toy.run, load_plan(toy.run))
    larger = with_budget(load_plan(toy.run), "4 nodeh")
    assert larger.budget is not None and larger.budget.job_s == 4 * 3600
    check_budget(toy.run, larger)
    # the budget that stopped it is refused, although the plan has another one and no request is left
    write_json(toy.run.plan, larger.model_dump(mode="json"))
    event = {"event": "stop_requested", "time": 0.0, "reason": "budget", "budget_s": 4 * 3600, "need_s": 60}
    append_json(toy.run.events, event)
    with pytest.raises(ConfigError, match="4 nodeh, has stopped it"):
        check_budget(toy.run, larger)
    check_budget(toy.run, with_budget(larger, "5nodeh"))
    append_json(toy.run.events, {**event, "reason": "walltime"})
    check_budget(toy.run, larger)


HOUR = 3600.0
STOP = BudgetStop(budget_s=HOUR, need_s=300.0)


@pytest.mark.parametrize(
    ("text", "job_s", "used", "margin_s", "stop", "words"),
    [
        ("60nodeh", HOUR, 0.0, 120.0, None, None),
        ("60nodeh", HOUR, HOUR, 0.0, None, "is used (100%)"),
        ("60nodeh", HOUR, 0.9 * HOUR, 120.0, STOP, "has stopped it (90% are used"),
        ("50nodeh", 3000.0, 0.5 * HOUR, 120.0, STOP, "has stopped it"),
        (
            "61nodeh",
            HOUR + 60,
            0.95 * HOUR,
            120.0,
            STOP,
            "leaves 4nodeh, and one more step and its save need 5",
        ),
        ("70nodeh", HOUR + 600, 0.95 * HOUR, 120.0, STOP, None),
        ("1GPUh", 60.0, 0.0, 120.0, None, "the save before its end needs 2GPUh: it must be more than 2GPUh"),
        (
            "60nodeh",
            HOUR,
            0.99 * HOUR,
            120.0,
            None,
            "leaves 0.6nodeh, and the save before its end needs 2nodeh",
        ),
        ("60nodeh", HOUR, 0.99 * HOUR, 0.0, None, None),
    ],
)
def test_a_budget_that_would_stop_the_next_attempt_before_its_first_step_is_refused(
    text: str, job_s: float, used: float, margin_s: float, stop: BudgetStop | None, words: str | None
) -> None:
    why = why_too_small(HourBudget(text=text, job_s=job_s), used, margin_s, stop)
    assert why is None if words is None else words in (why or "")


def test_a_new_run_with_a_budget_smaller_than_its_margin_is_refused(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, TOY_RECIPE, processes=[process_plan(Role.TRAINER)])
    plan = with_budget(plan.model_copy(update={"signal_margin_s": 120}), "0.01nodeh")
    with pytest.raises(ConfigError, match=r"--budget 0.01nodeh leaves 0.01nodeh.*more than 0.0333nodeh"):
        check_new_budget(plan)


@pytest.mark.parametrize("text", ["500", "0GPUh", "-3GPUh", "500GPU", "many"])
def test_a_budget_that_is_not_a_number_of_hours_is_refused(tmp_path: Path, text: str) -> None:
    plan = make_plan(tmp_path, TOY_RECIPE, processes=[process_plan(Role.TRAINER)], accelerator="gpu")
    with pytest.raises(ConfigError, match="500GPUh"):
        with_budget(plan, text)


def test_a_budget_counts_all_gpus_and_spare_nodes_of_the_plan(tmp_path: Path) -> None:
    processes = [process_plan(Role.TRAINER, nodes=3, accelerators=4)]
    plan = make_plan(tmp_path, TOY_RECIPE, processes=processes, accelerator="gpu")
    plan = plan.model_copy(update={"spare_nodes": 1, "allocated_gpus": 16})
    for text, hours in (("32GPUh", 2.0), ("8nodeH", 2.0)):
        assert (budget := with_budget(plan, text).budget) is not None and budget.job_s == hours * 3600
    with pytest.raises(ConfigError, match="has no GPUs"):
        with_budget(plan.model_copy(update={"allocated_gpus": 0}), "32GPUh")


@pytest.mark.parametrize(
    ("gpus", "gres", "spares", "allocated"),
    [
        (4, (), 0, 12),
        (4, (), 1, 16),
        (0, ("gpu:8",), 0, 24),  # as tools/virtual-cluster: allocated, and used by no process
        (0, ("gpu:h100:8", "tmpfs:200G"), 1, 32),
        (0, ("gpu", "lustre:1"), 0, 3),
        (0, (), 0, 0),
    ],
)
def test_gpus_of_a_job_are_those_that_slurm_accounts_for(
    gpus: int, gres: tuple[str, ...], spares: int, allocated: int
) -> None:
    profile = load_profile("virtual").profile
    node = profile.node.model_copy(update={"gpus": gpus})
    scheduler = profile.scheduler.model_copy(update={"gres": gres})
    profile = profile.model_copy(update={"node": node, "scheduler": scheduler})
    components = (ComponentPlan(nodes=(0, 1, 2), spare_nodes=spares), ComponentPlan(nodes=(3,), is_cpu=True))
    assert allocated_gpus(components, profile) == allocated
