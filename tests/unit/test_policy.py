"""What an exit means: served roles restart while the run moves, worked-off roles end the phase, faults end the run."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.names import Role
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.runtime.allocation import Allocation, parse_time_left, smallest
from primerl_hpc.runtime.policy import RESTARTS_WITHOUT_PROGRESS, SERVED_WELL_S, Action, PhasePolicy
from primerl_hpc.runtime.requeue import why_not_again
from primerl_hpc.runtime.srun_step import code_of, srun_command
from primerl_hpc.runtime.steps import ExitStatus, Launch
from tests.support import make_plan, process_plan


def policy_of(*overrides: str) -> PhasePolicy:
    recipe = load_recipe("reverse_text/tiny", overrides=list(overrides)).recipe
    plan = compile_plan(recipe, load_profile("local").profile, run_dir="/r", python="py")
    return PhasePolicy(plan.phase("main"))


@pytest.fixture
def policy() -> PhasePolicy:
    return policy_of()


def test_the_phase_is_done_when_trainer_and_orchestrator_both_are(policy: PhasePolicy) -> None:
    assert policy.on_exit("trainer-0", 0, progress=1).action == Action.GO_ON
    assert policy.on_exit("orchestrator-0", 0, progress=1).action == Action.PHASE_DONE


def test_a_stop_of_either_side_stops_the_phase(policy: PhasePolicy) -> None:
    assert policy.on_exit("trainer-0", ExitCode.STOPPED, progress=1).action == Action.GO_ON
    assert policy.on_exit("orchestrator-0", 0, progress=1).action == Action.PHASE_STOPPED


@pytest.mark.parametrize("code", [1, -9, 137])
@pytest.mark.parametrize("name", ["trainer-0", "orchestrator-0"])
def test_a_dead_trainer_or_orchestrator_fails_the_run_where_recovery_is_off(name: str, code: int) -> None:
    policy = policy_of("recovery.in_place=false")
    assert policy.on_exit(name, code, progress=1, step=5).action == Action.FAIL


@pytest.mark.parametrize("code", [1, -9, 137])
@pytest.mark.parametrize("name", ["trainer-0", "orchestrator-0"])
def test_a_dead_trainer_or_orchestrator_recovers_while_the_run_moves(
    policy: PhasePolicy, name: str, code: int
) -> None:
    for step in (5, 6, 9):
        assert policy.on_exit(name, code, progress=1, step=step).action == Action.RECOVER
    assert policy.on_exit(name, code, progress=99, step=9).action == Action.FAIL  # 6 to 9 again are no news


def test_a_lost_node_is_not_the_runs_fault(policy: PhasePolicy) -> None:
    for _ in range(3):
        assert policy.on_exit("trainer-0", 137, progress=1, step=5, is_lost=True).action == Action.RECOVER
    assert policy.on_exit("trainer-0", 1, progress=1, step=5).action == Action.FAIL


@pytest.mark.parametrize("code", [ExitCode.CONFIG, ExitCode.DATA, ExitCode.NO_CONTINUE])
def test_a_fault_that_would_come_again_is_not_recovered_from(policy: PhasePolicy, code: int) -> None:
    assert policy.on_exit("trainer-0", code, progress=1, step=5).action == Action.FAIL


def test_pauses_before_recoveries_grow_to_a_minute(policy: PhasePolicy) -> None:
    delays = [policy.on_exit("trainer-0", 1, progress=1, step=step).delay_s for step in range(12)]
    assert delays == sorted(delays) and delays[0] <= 1 and delays[-1] == 60


def test_a_recovery_calls_for_both_ends_again(policy: PhasePolicy) -> None:
    assert policy.on_exit("trainer-0", 0, progress=1, step=5).action == Action.GO_ON
    assert policy.on_exit("orchestrator-0", 1, progress=1, step=5).action == Action.RECOVER
    assert policy.on_exit("orchestrator-0", 0, progress=1, step=5).action == Action.GO_ON
    assert policy.on_exit("trainer-0", 0, progress=1, step=5).action == Action.PHASE_DONE


@pytest.mark.parametrize("name", ["inference-0", "router-0", "env_server-1"])
@pytest.mark.parametrize("code", [0, 1, -9])
def test_a_served_role_is_restarted_whatever_its_code(policy: PhasePolicy, name: str, code: int) -> None:
    assert policy.on_exit(name, code, progress=1).action == Action.RESTART


def test_restarts_are_bounded_by_progress_not_by_count(policy: PhasePolicy) -> None:
    for progress in range(50):
        assert policy.on_exit("inference-0", -9, progress=progress).action == Action.RESTART
    for _ in range(RESTARTS_WITHOUT_PROGRESS - 1):
        assert policy.on_exit("inference-0", -9, progress=49).action == Action.RESTART
    assert policy.on_exit("inference-0", -9, progress=49).action == Action.FAIL


def test_an_engine_of_a_run_that_only_serves_is_forgiven_when_it_served_for_long(tmp_path: Path) -> None:
    recipe = {"kind": "inference", "name": "toy", "model": {"name": "a/b"}}
    policy = PhasePolicy(make_plan(tmp_path, recipe, processes=[process_plan(Role.INFERENCE)]).phases[0])

    def after(served_s: float) -> Action:
        return policy.on_exit("inference-0", -9, progress=0, served_s=served_s).action

    for _ in range(20):
        assert after(SERVED_WELL_S) == Action.RESTART
    for _ in range(RESTARTS_WITHOUT_PROGRESS - 1):
        assert after(SERVED_WELL_S - 1) == Action.RESTART
    assert after(SERVED_WELL_S - 1) == Action.FAIL


def test_time_alone_is_no_progress_of_a_run_that_trains(policy: PhasePolicy) -> None:
    actions = [
        policy.on_exit("inference-0", -9, progress=1, served_s=10 * SERVED_WELL_S).action
        for _ in range(RESTARTS_WITHOUT_PROGRESS + 1)
    ]
    assert actions[-1] == Action.FAIL


def test_pauses_before_restarts_grow_and_start_at_nothing(policy: PhasePolicy) -> None:
    delays = [policy.on_exit("router-0", 1, progress=1).delay_s for _ in range(RESTARTS_WITHOUT_PROGRESS)]
    assert delays[0] == 0 and delays == sorted(delays)


def test_a_run_goes_on_without_its_tracker() -> None:
    recipe = load_recipe("reverse_text/tiny", overrides=["tracking.wandb={}"]).recipe
    plan = compile_plan(recipe, load_profile("local").profile, run_dir="/r", python="py")
    policy = PhasePolicy(plan.phase("main"))
    actions = [
        policy.on_exit("tracker-0", 1, progress=1).action for _ in range(RESTARTS_WITHOUT_PROGRESS + 1)
    ]
    assert actions == [Action.RESTART] * RESTARTS_WITHOUT_PROGRESS + [Action.GO_ON]
    assert policy.on_exit("tracker-0", ExitCode.CONFIG, progress=1).action == Action.GO_ON


def test_a_served_role_with_a_wrong_configuration_is_not_tried_again(policy: PhasePolicy) -> None:
    assert policy.on_exit("env_server-0", ExitCode.CONFIG, progress=1).action == Action.FAIL


@pytest.mark.parametrize(
    ("code", "signal"), [(-9, 9), (137, 9), (143, 15), (1, None), (0, None), (255, None)]
)
def test_exit_codes_tell_signals(code: int, signal: int | None) -> None:
    assert ExitStatus(code).signal == signal


def test_srun_inherits_nothing_but_is_told_nodes_tasks_cpus_and_name(
    policy: PhasePolicy, tmp_path: Path
) -> None:
    from primerl_hpc.common.rundir import RunDir

    trainer = policy.phase.process("trainer-0").model_copy(update={"nodes": (1, 2)})
    allocation = Allocation(("n1", "n2", "n3"), 64, has_gpus=False, gpus_per_node=0, job_id="7")
    command = srun_command(Launch(trainer, RunDir(tmp_path), "main", 1, 0), allocation)
    told = {
        "--overlap",
        "--job-name=trainer-0",
        "--nodes=2",
        "--ntasks=2",
        "--nodelist=n2,n3",
        "--cpus-per-task=64",
    }
    assert told <= set(command)
    assert any(word.startswith("--output=") and "%n" in word for word in command)
    assert command[-len(trainer.argv) :] == list(trainer.argv)


@pytest.mark.parametrize(
    "said, code",
    [
        ("Exited with exit code 7", 7),
        ("Killed", 137),
        ("Segmentation fault (core dumped)", 139),
        ("words of a later srun", 5),
    ],
)
def test_sruns_words_about_a_task_become_its_code(said: str, code: int) -> None:
    assert code_of(said, 5) == code


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("1-02:03:04", 93784),
        ("2:03:04", 7384),
        ("3:04", 184),
        ("UNLIMITED", math.inf),
        ("INVALID", None),
        ("", None),
    ],
)
def test_the_time_left_is_read_from_squeue(text: str, seconds: float | None) -> None:
    assert parse_time_left(text) == seconds


@pytest.mark.parametrize("counts, least", [("64(x4)", 64), ("64,32(x3)", 32), ("8", 8)])
def test_a_step_asks_for_what_the_smallest_node_has(counts: str, least: int) -> None:
    assert smallest(counts) == least


USR2, TERM = signal.SIGUSR2, signal.SIGTERM


@pytest.mark.parametrize(
    "reason, signals, progressed, again",
    [
        ("walltime", {USR2}, True, True),
        ("walltime", set(), True, True),  # SLURM's own warning was lost
        ("walltime", set(), False, False),  # the next attempt would end the same way
        ("scheduler", set(), False, True),  # preempted: no fault of the run
        ("scheduler", {TERM}, True, False),  # cancelled; or SLURM requeues it itself
        ("SIGTERM", {TERM}, True, False),
        ("cancel", set(), True, False),
    ],
)
def test_only_walltime_and_preemption_go_back_into_the_queue(
    reason: str, signals: set[int], progressed: bool, again: bool
) -> None:
    assert (why_not_again({"reason": reason}, signals, progressed=progressed) is None) is again
