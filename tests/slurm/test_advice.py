"""The advice of `diagnose` after the end of a job, and that the advised command works."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.plan.plan import HourBudget, OnExit
from tests.support.helpers import wait_for
from tests.support.virtual_slurm import SERVE, TRAIN, SlurmToy, run_cli


def diagnosis_of(toy: SlurmToy) -> dict[str, Any]:
    return json.loads(run_cli("diagnose", str(toy.run.root), "--json").stdout)


def add_roles(toy: SlurmToy) -> None:
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART)
    toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE)


def test_a_job_whose_interpreter_does_not_exist_on_the_node_is_not_resumed_but_submitted_again(
    toy: SlurmToy,
) -> None:
    """As with the path of an image in software.default.python: each attempt would fail after another queue."""
    add_roles(toy)
    toy.prepare()
    script = toy.run.job_script
    script.write_text(script.read_text().replace(sys.executable, "/opt/nowhere/bin/python"))
    toy.submit()
    toy.wait_for_state(RunState.FAILED)
    found = diagnosis_of(toy)
    assert found["known"]["name"] == "interpreter" and "/opt/nowhere/bin/python" in found["known"]["what"]
    assert found["can_retry"] is False and found["next"].startswith("primerl-hpc submit"), found
    toy.prepare()  # with the right path
    toy.submit()
    toy.wait_until_ready("inference-0", "trainer-0")
    toy.finish()


def test_a_run_that_its_budget_stopped_continues_only_with_a_larger_one(toy: SlurmToy) -> None:
    add_roles(toy)
    budget = HourBudget(text="0.0056nodeh", job_s=20.0)
    toy.plan_changes = {"budget": budget, "signal_margin_s": 10, "allocated_gpus": 8}
    toy.prepare()
    toy.submit()
    toy.wait_for_state(RunState.STOPPED)
    (stop,) = toy.events("stop_requested")
    assert stop["reason"] == "budget" and stop["budget_s"] == 20.0 and stop["limit_s"] > 0
    found = diagnosis_of(toy)
    assert found["next"].endswith("--budget HOURS") and found["slurm"] is None, found
    wait_for(lambda: (fact := toy.accounted()) is not None and fact.exit_code is not None, "its end")
    command = shlex.split(found["next"])[1:]
    for refused in (command[:-2], [*command[:-1], "0.005nodeh"]):
        done = run_cli(*refused)
        assert done.returncode == ExitCode.CONFIG and "has stopped it" in done.stderr, done.stderr
    done = run_cli(*command[:-1], "100GPUh")
    assert done.returncode == 0, done.stderr
    toy.wait_until_ready("trainer-0", attempt=2)
    toy.finish()
