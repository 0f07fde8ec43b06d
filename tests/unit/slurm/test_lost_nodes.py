"""The loss of a node: how it is found, and what it means for a run with and without spare nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import Role
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.allocation import Allocation
from primerl_hpc.runtime.phase import PhaseRun
from primerl_hpc.runtime.process_state import ProcessState
from primerl_hpc.runtime.step import ExitStatus, Launch, PhaseEnd
from primerl_hpc.runtime.steps.srun import SrunStep
from tests.support.helpers import process_plan
from tests.support.slurm_rows import printed, row
from tests.unit.slurm.test_busy_slurm import commands, end_of_trainer, run  # noqa: F401

# printed by srun 22.05 for a step on n2 and n3, a minute after the power cut of n3
NO_LAUNCH = b"""\
srun: error: Task launch for StepId=1.3 failed on node n3: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
srun: error: n2: task 0: Killed
"""
REFUSED = b"srun: error: Task launch for StepId=1.3 failed on node n3: Job credential expired\n"
RESPONDING = {
    "squeue": printed(row("7", "7", "n1", "RUNNING")),
    "scontrol": "echo n1",
    "sinfo": "echo n1 allocated",
}


def decide(phase: PhaseRun, trainer: ProcessState) -> PhaseEnd | None:
    """Return the decision about the trainer's exit, after everything it writes has been written."""

    async def on_exit() -> PhaseEnd | None:
        end = await phase._on_exit(trainer)
        await phase.journal.settle()
        return end

    return asyncio.run(on_exit())


@pytest.mark.parametrize("printed, unreachable", [(NO_LAUNCH, {"n3"}), (REFUSED, set()), (b"", set())])
def test_a_host_that_accepts_no_connection_of_srun_is_unreachable(
    tmp_path: Path, printed: bytes, unreachable: set[str]
) -> None:
    plan = process_plan(Role.TRAINER).model_copy(update={"nodes": (0, 1)})
    step = SrunStep(
        Launch(plan, RunDir(tmp_path / "toy"), "main", 1, 0),
        Allocation(("n2", "n3"), 1, False, 0, job_id="1"),
    )
    step.output = printed
    status = step._read_exit(1)
    assert status.unreachable == unreachable
    assert (status.code, status.host) == ((137, "n2") if unreachable else (1, "n2"))


@pytest.mark.parametrize("state", ["allocated*", "down", "completing*", "failing"])
def test_without_spares_a_lost_node_ends_the_attempt_and_not_the_run(
    commands: Callable[..., Path],  # noqa: F811
    run: RunDir,  # noqa: F811
    state: str,
) -> None:
    commands(**RESPONDING | {"sinfo": f"echo 'n1 {state}'"})
    _, phase, trainer = end_of_trainer(run, spares=())
    assert decide(phase, trainer) == PhaseEnd.ABANDONED
    assert phase.is_out_of_nodes and read_json(run.stop_request)["reason"] == "scheduler"
    failure = read_json(run.failure)
    assert failure["exit_code"] == ExitCode.BAD_NODE and failure["node"] == "n1"
    assert failure["message"] == "n1 was lost, and the job has no spare nodes"
    assert state in failure["reason"]


def test_a_node_on_which_no_step_starts_is_lost_although_slurm_has_not_noticed(
    commands: Callable[..., Path],  # noqa: F811
    run: RunDir,  # noqa: F811
) -> None:
    commands(**RESPONDING)
    _, phase, trainer = end_of_trainer(run, ExitStatus(1, "n1", unreachable=frozenset({"n1"})), spares=())
    assert decide(phase, trainer) == PhaseEnd.ABANDONED
    assert "no connection" in read_json(run.failure)["reason"]


@pytest.mark.parametrize(
    "answers",
    [RESPONDING, RESPONDING | {"squeue": printed(row("7", "7", "n4", "COMPLETING")), "scontrol": "echo n4"}],
    ids=["responds", "job ends"],
)
def test_a_failure_on_a_node_that_responds_or_at_the_end_of_the_job_is_no_loss(
    commands: Callable[..., Path],  # noqa: F811
    run: RunDir,  # noqa: F811
    answers: dict[str, str],
) -> None:
    """SLURM lists only those nodes of an ending job that have not yet ended it."""
    commands(**answers)
    _, phase, trainer = end_of_trainer(run, spares=())
    assert decide(phase, trainer) is None
    assert not phase.is_out_of_nodes and not run.failure.exists() and trainer.restart_at is not None


def test_a_stop_after_a_save_asks_slurm_nothing(
    commands: Callable[..., Path],  # noqa: F811
    run: RunDir,  # noqa: F811
) -> None:
    calls = commands(**RESPONDING)
    _, phase, trainer = end_of_trainer(run, ExitStatus(ExitCode.STOPPED), spares=())
    assert decide(phase, trainer) == PhaseEnd.STOPPED
    assert not calls.exists()
