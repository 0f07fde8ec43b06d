"""Meaning of an exit: served roles restart while the run moves, worked-off roles end the phase, faults end the run."""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.names import Role
from primerl_hpc.plan.plan import OnExit, PhasePlan
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.runtime.allocation import Allocation, smallest
from primerl_hpc.runtime.job.requeue import decide_continuation
from primerl_hpc.runtime.policy import (
    MAX_RECOVERY_PAUSE_S,
    RESTARTS_WITHOUT_PROGRESS,
    SERVED_WELL_S,
    Action,
    PhasePolicy,
    ProcessExit,
    RestartDecision,
)
from primerl_hpc.runtime.step import ExitStatus, Launch
from primerl_hpc.runtime.steps.srun import code_of, srun_command
from primerl_hpc.slurm.commands import parse_time_left
from tests.support.helpers import make_plan, process_plan


@cache
def phase_of(*overrides: str) -> PhasePlan:
    recipe = load_recipe("reverse_text/tiny", overrides=list(overrides)).recipe
    plan = compile_plan(recipe, load_profile("local").profile, run_dir="/r", python="py")
    return plan.phase("main")


def policy_of(*overrides: str) -> PhasePolicy:
    return PhasePolicy(phase_of(*overrides))


@pytest.fixture
def policy() -> PhasePolicy:
    return policy_of()


def test_the_phase_is_done_when_trainer_and_orchestrator_both_are(policy: PhasePolicy) -> None:
    assert policy.on_exit("trainer-0", ProcessExit(0, progress=1)).action == Action.CONTINUE
    assert policy.on_exit("orchestrator-0", ProcessExit(0, progress=1)).action == Action.PHASE_DONE


def test_a_stop_of_either_side_stops_the_phase(policy: PhasePolicy) -> None:
    assert policy.on_exit("trainer-0", ProcessExit(ExitCode.STOPPED, progress=1)).action == Action.CONTINUE
    assert policy.on_exit("orchestrator-0", ProcessExit(0, progress=1)).action == Action.PHASE_STOPPED


@pytest.mark.parametrize("code", [1, -9, 137])
@pytest.mark.parametrize("name", ["trainer-0", "orchestrator-0"])
def test_an_exit_of_trainer_or_orchestrator_fails_the_run_if_recovery_is_off(name: str, code: int) -> None:
    policy = policy_of("recovery.in_place=false")
    assert policy.on_exit(name, ProcessExit(code, progress=1, step=5)).action == Action.FAIL


@pytest.mark.parametrize("code", [1, -9, 137])
@pytest.mark.parametrize("name", ["trainer-0", "orchestrator-0"])
def test_trainer_and_orchestrator_recover_while_the_run_makes_progress(
    policy: PhasePolicy, name: str, code: int
) -> None:
    for step in (5, 6, 9):
        assert policy.on_exit(name, ProcessExit(code, progress=1, step=step)).action == Action.RECOVER
    # 6 to 9 again are no news: the same fault at the same place
    assert policy.on_exit(name, ProcessExit(code, progress=99, step=9)).action == Action.FAIL


def test_a_lost_node_is_not_the_runs_fault(policy: PhasePolicy) -> None:
    for _ in range(5):
        assert (
            policy.on_exit("trainer-0", ProcessExit(137, progress=1, step=5, is_lost=True)).action
            == Action.RECOVER
        )
    assert policy.on_exit("trainer-0", ProcessExit(1, progress=1, step=5)).action == Action.RECOVER
    assert policy.on_exit("trainer-0", ProcessExit(1, progress=1, step=5)).action == Action.FAIL


def test_the_loss_of_a_node_does_not_end_an_attempt_without_recovery() -> None:
    policy = policy_of("recovery.in_place=false")
    end = ProcessExit(137, progress=1, step=5, is_lost=True)
    assert policy.on_exit("trainer-0", end).action == Action.RECOVER


def test_a_fault_that_repeats_at_the_same_place_with_the_same_cause_ends_the_run(policy: PhasePolicy) -> None:
    faults = [("trainer-0", 4, "a"), ("trainer-0", 4, "b"), ("orchestrator-0", 4, "a")]
    for name, after_step, cause in faults:
        decision = policy.on_exit(
            name, ProcessExit(1, progress=1, step=4, after_step=after_step, cause=cause)
        )
        assert decision.action == Action.RECOVER
    decision = policy.on_exit("trainer-0", ProcessExit(1, progress=1, step=4, after_step=4, cause="b"))
    assert (decision.action, decision.reason) == (
        Action.FAIL,
        "trainer-0 failed twice after step 4 with the same cause, without a new step in between",
    )


def test_kills_from_outside_end_the_run_only_after_max_without_progress(policy: PhasePolicy) -> None:
    limit = policy.phase.recipe.recovery.max_without_progress
    assert limit == 3

    def kill(step: int) -> RestartDecision:
        return policy.on_exit(
            "trainer-0", ProcessExit(-9, progress=1, step=step, after_step=0, is_killed=True)
        )

    for step in (5, 6):  # a new step gives all of it back
        decisions = [kill(step) for _ in range(limit)]
        assert {decision.action for decision in decisions} == {Action.RECOVER}
        delays = [decision.delay_s for decision in decisions]
        assert delays == sorted(set(delays))
    decision = kill(6)
    assert decision.action == Action.FAIL and "3 recoveries without a new step" in decision.reason


# (whose end, the step after which it was, a new step since the last fault, its cause, killed from outside)
FAULTS = st.lists(
    st.tuples(
        st.sampled_from(["trainer-0", "orchestrator-0"]),
        st.integers(0, 2),
        st.booleans(),
        st.sampled_from(["a", "b"]),
        st.booleans(),
    ),
    max_size=40,
)


@given(FAULTS, st.integers(1, 5))
def test_recoveries_follow_the_rule_for_every_sequence_of_faults(
    faults: list[tuple[str, int, bool, str, bool]], limit: int
) -> None:
    """Against a second formulation of it: look back at the faults since the last new step."""
    policy = policy_of(f"recovery.max_without_progress={limit}")
    step, since = 0, []
    for name, after_step, has_progress, cause, is_killed in faults:
        if has_progress:
            step, since = step + 1, []
        decision = policy.on_exit(
            name,
            ProcessExit(1, progress=1, step=step, after_step=after_step, cause=cause, is_killed=is_killed),
        )
        fault = (name, after_step, cause)
        repeats = not is_killed and fault in [each for each, was_killed in since if not was_killed]
        expected = Action.FAIL if repeats or len(since) >= limit else Action.RECOVER
        assert decision.action == expected
        if expected == Action.FAIL:
            return
        assert 0 < decision.delay_s <= MAX_RECOVERY_PAUSE_S
        since.append((fault, is_killed))


@given(st.integers(1, 5), st.lists(st.booleans(), min_size=1, max_size=60))
def test_a_run_without_new_steps_recovers_only_so_often(limit: int, kills: list[bool]) -> None:
    policy = policy_of(f"recovery.max_without_progress={limit}")
    actions = []
    for number, is_killed in enumerate(kills):
        actions.append(
            policy.on_exit(
                "trainer-0", ProcessExit(1, progress=number, step=7, cause=str(number), is_killed=is_killed)
            ).action
        )
        if actions[-1] == Action.FAIL:
            break
    assert actions.count(Action.RECOVER) == min(len(kills), limit)


@pytest.mark.parametrize("code", [ExitCode.USAGE, ExitCode.CONFIG, ExitCode.DATA, ExitCode.NO_CONTINUE])
def test_a_fault_that_would_come_again_is_not_recovered_from(policy: PhasePolicy, code: int) -> None:
    assert policy.on_exit("trainer-0", ProcessExit(code, progress=1, step=5)).action == Action.FAIL


def test_pauses_before_recoveries_without_a_new_step_grow_to_a_minute() -> None:
    policy = policy_of("recovery.max_without_progress=12")
    delays = [
        policy.on_exit("trainer-0", ProcessExit(1, progress=1, step=5, cause=str(n))).delay_s
        for n in range(12)
    ]
    assert delays == sorted(delays) and delays[0] <= 1 and delays[-1] == 60
    assert policy.on_exit("trainer-0", ProcessExit(1, progress=1, step=6)).delay_s <= 1  # the run moves


def test_a_recovery_calls_for_both_ends_again(policy: PhasePolicy) -> None:
    assert policy.on_exit("trainer-0", ProcessExit(0, progress=1, step=5)).action == Action.CONTINUE
    assert policy.on_exit("orchestrator-0", ProcessExit(1, progress=1, step=5)).action == Action.RECOVER
    assert policy.on_exit("orchestrator-0", ProcessExit(0, progress=1, step=5)).action == Action.CONTINUE
    assert policy.on_exit("trainer-0", ProcessExit(0, progress=1, step=5)).action == Action.PHASE_DONE


@pytest.mark.parametrize("name", ["inference-0", "router-0", "env_server-1"])
@pytest.mark.parametrize("code", [0, 1, -9])
def test_a_served_role_is_restarted_whatever_its_code(policy: PhasePolicy, name: str, code: int) -> None:
    assert policy.on_exit(name, ProcessExit(code, progress=1)).action == Action.RESTART


def test_restarts_are_bounded_by_progress_not_by_count(policy: PhasePolicy) -> None:
    for progress in range(50):
        assert policy.on_exit("inference-0", ProcessExit(-9, progress=progress)).action == Action.RESTART
    for _ in range(RESTARTS_WITHOUT_PROGRESS - 1):
        assert policy.on_exit("inference-0", ProcessExit(-9, progress=49)).action == Action.RESTART
    assert policy.on_exit("inference-0", ProcessExit(-9, progress=49)).action == Action.FAIL


def test_long_service_clears_the_failures_of_an_engine_in_an_inference_run(tmp_path: Path) -> None:
    recipe = {"kind": "inference", "name": "toy", "model": {"name": "a/b"}}
    policy = PhasePolicy(make_plan(tmp_path, recipe, processes=[process_plan(Role.INFERENCE)]).phases[0])

    def after(served_s: float) -> Action:
        return policy.on_exit("inference-0", ProcessExit(-9, progress=0, served_s=served_s)).action

    for _ in range(20):
        assert after(SERVED_WELL_S) == Action.RESTART
    for _ in range(RESTARTS_WITHOUT_PROGRESS - 1):
        assert after(SERVED_WELL_S - 1) == Action.RESTART
    assert after(SERVED_WELL_S - 1) == Action.FAIL


def test_time_alone_is_no_progress_of_a_run_that_trains(policy: PhasePolicy) -> None:
    actions = [
        policy.on_exit("inference-0", ProcessExit(-9, progress=1, served_s=10 * SERVED_WELL_S)).action
        for _ in range(RESTARTS_WITHOUT_PROGRESS + 1)
    ]
    assert actions[-1] == Action.FAIL


def test_pauses_before_restarts_grow_and_start_at_nothing(policy: PhasePolicy) -> None:
    delays = [
        policy.on_exit("router-0", ProcessExit(1, progress=1)).delay_s
        for _ in range(RESTARTS_WITHOUT_PROGRESS)
    ]
    assert delays[0] == 0 and delays == sorted(delays)


def test_a_run_continues_without_its_tracker() -> None:
    recipe = load_recipe("reverse_text/tiny", overrides=["tracking.wandb={}"]).recipe
    plan = compile_plan(recipe, load_profile("local").profile, run_dir="/r", python="py")
    policy = PhasePolicy(plan.phase("main"))
    actions = [
        policy.on_exit("tracker-0", ProcessExit(1, progress=1)).action
        for _ in range(RESTARTS_WITHOUT_PROGRESS + 1)
    ]
    assert actions == [Action.RESTART] * RESTARTS_WITHOUT_PROGRESS + [Action.CONTINUE]
    assert policy.on_exit("tracker-0", ProcessExit(ExitCode.CONFIG, progress=1)).action == Action.CONTINUE


def test_a_served_role_with_a_wrong_configuration_is_not_tried_again(policy: PhasePolicy) -> None:
    assert policy.on_exit("env_server-0", ProcessExit(ExitCode.CONFIG, progress=1)).action == Action.FAIL


def test_a_process_that_serves_may_fail_three_times_without_progress_after_growing_pauses(
    policy: PhasePolicy,
) -> None:
    decisions = [policy.on_exit("router-0", ProcessExit(1, progress=5)) for _ in range(4)]
    assert [decision.delay_s for decision in decisions] == [0, 1.5, 7.5, 0]
    assert [decision.action for decision in decisions] == [Action.RESTART] * 3 + [Action.FAIL]
    assert decisions[3].reason == "router-0 failed 4 times without progress of the run in between"


def test_the_failures_of_a_process_that_serves_are_counted_for_itself(policy: PhasePolicy) -> None:
    for name in ("router-0", "inference-0"):
        for _ in range(RESTARTS_WITHOUT_PROGRESS):
            assert policy.on_exit(name, ProcessExit(1, progress=5)).action == Action.RESTART


def test_an_inference_run_is_served_well_after_ten_minutes(tmp_path: Path) -> None:
    recipe = {"kind": "inference", "name": "toy", "model": {"name": "a/b"}}
    policy = PhasePolicy(make_plan(tmp_path, recipe, processes=[process_plan(Role.INFERENCE)]).phases[0])
    for served_s in (600.0, 0.0, 599.0, 599.0):
        decision = policy.on_exit("inference-0", ProcessExit(-9, progress=0, served_s=served_s))
    assert decision.action == Action.FAIL
    assert decision.reason == "inference-0 failed 4 times without serving for 600 s in between"


def test_a_lost_node_takes_no_restart_from_a_process_that_serves(policy: PhasePolicy) -> None:
    lost = [
        policy.on_exit("inference-0", ProcessExit(ExitCode.CONFIG, progress=1, is_lost=True))
        for _ in range(9)
    ]
    assert set(lost) == {RestartDecision(Action.RESTART)}
    assert policy.on_exit("inference-0", ProcessExit(1, progress=1)) == RestartDecision(Action.RESTART)


def test_pauses_before_recoveries_are_four_times_the_last_and_at_most_a_minute() -> None:
    policy = policy_of("recovery.max_without_progress=5")
    delays = [policy.on_exit("trainer-0", ProcessExit(1, progress=1, cause=str(n))).delay_s for n in range(5)]
    assert delays == [1, 4, 16, 60, 60]


def test_a_new_step_forgets_the_faults_before_it(policy: PhasePolicy) -> None:
    for step in (0, 1, 2):
        for cause in ("a", "b"):
            decision = policy.on_exit("trainer-0", ProcessExit(1, progress=1, step=step, cause=cause))
            assert decision.action == Action.RECOVER
            assert decision.reason == "trainer-0 exited before its work was done"
    decision = policy.on_exit("trainer-0", ProcessExit(1, progress=1, step=2, cause="a"))
    assert decision.reason.startswith("trainer-0 failed twice after step 0 with the same cause")


def test_the_first_step_of_a_run_is_a_new_step(policy: PhasePolicy) -> None:
    assert policy.on_exit("trainer-0", ProcessExit(1, progress=1)).action == Action.RECOVER  # before any step
    assert policy.on_exit("trainer-0", ProcessExit(1, progress=2, step=1)).action == Action.RECOVER
    assert policy.on_exit("trainer-0", ProcessExit(1, progress=2, step=1)).action == Action.FAIL


def test_exits_without_a_known_cause_are_the_same_fault_if_their_codes_are(policy: PhasePolicy) -> None:
    assert policy.on_exit("trainer-0", ProcessExit(1, progress=1)).action == Action.RECOVER
    assert policy.on_exit("trainer-0", ProcessExit(139, progress=1)).action == Action.RECOVER
    assert policy.on_exit("trainer-0", ProcessExit(139, progress=1)).action == Action.FAIL


def test_a_lost_node_is_no_recovery_without_progress(policy: PhasePolicy) -> None:
    for _ in range(9):
        decision = policy.on_exit("trainer-0", ProcessExit(137, progress=1, step=5, is_lost=True))
        assert (decision.action, decision.delay_s) == (Action.RECOVER, 1)


def test_a_run_that_does_not_train_has_no_checkpoint_to_recover_from(tmp_path: Path) -> None:
    recipe = {"kind": "eval", "name": "toy", "model": {"name": "a/b"}}
    recipe["environments"] = {"eval": [{"id": "reverse-text"}]}
    process = process_plan(Role.EVALUATOR, on_exit=OnExit.ENDS_PHASE)
    policy = PhasePolicy(make_plan(tmp_path, recipe, processes=[process]).phases[0])
    decision = policy.on_exit("evaluator-0", ProcessExit(1, progress=1))
    assert decision == RestartDecision(Action.FAIL, reason="evaluator-0 exited before its work was done")


def test_an_sft_run_recovers(tmp_path: Path) -> None:
    recipe = {"kind": "sft", "name": "toy", "model": {"name": "a/b"}, "max_steps": 3}
    recipe["sft"] = {"data": {"path": "none.jsonl"}}
    policy = PhasePolicy(make_plan(tmp_path, recipe, processes=[process_plan(Role.SFT)]).phases[0])
    assert policy.on_exit("sft-0", ProcessExit(1, progress=1)).action == Action.RECOVER
    assert policy.on_exit("sft-0", ProcessExit(0, progress=2)).action == Action.PHASE_DONE


@pytest.mark.parametrize(
    ("code", "signal"), [(-9, 9), (137, 9), (143, 15), (1, None), (0, None), (255, None)]
)
def test_exit_codes_contain_signals(code: int, signal: int | None) -> None:
    assert ExitStatus(code).signal == signal


def test_srun_gets_nodes_tasks_cpus_and_name_as_options_and_inherits_none(
    policy: PhasePolicy, tmp_path: Path
) -> None:
    from primerl_hpc.run.rundir import RunDir

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


@pytest.mark.parametrize("is_accepted", [True, False])
def test_steps_name_memory_and_gpus_only_where_the_site_accepts_it(
    policy: PhasePolicy, tmp_path: Path, is_accepted: bool
) -> None:
    from primerl_hpc.run.rundir import RunDir

    allocation = Allocation(("n1",), 64, has_gpus=True, gpus_per_node=8, job_id="7")
    allocation = replace(allocation, step_memory=is_accepted, step_gres=is_accepted)
    orchestrator = policy.phase.process("orchestrator-0")  # uses no GPU
    command = srun_command(Launch(orchestrator, RunDir(tmp_path), "main", 1, 0), allocation)
    assert {"--mem=0", "--gres=none"} & set(command) == ({"--mem=0", "--gres=none"} if is_accepted else set())


@pytest.mark.parametrize(
    "said, code",
    [
        ("Exited with exit code 7", 7),
        ("Killed", 137),
        ("Segmentation fault (core dumped)", 139),
        ("words of a later srun", 5),
    ],
)
def test_sruns_message_about_a_task_becomes_its_exit_code(said: str, code: int) -> None:
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
def test_a_step_requests_the_cores_of_the_smallest_node(counts: str, least: int) -> None:
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
    assert decide_continuation({"reason": reason}, signals, progressed=progressed).is_automatic is again
