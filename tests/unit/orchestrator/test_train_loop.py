"""The loop of the orchestrator: time limits, and what happens to tasks without a result."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.common.errors import RoleError, TimeoutWaitingError
from primerl_hpc.common.files import read_json, write_json, write_text
from primerl_hpc.envs.tasks import EnvironmentTask
from primerl_hpc.orchestrator import driver as driver_module
from primerl_hpc.orchestrator import train_loop as loop_module
from primerl_hpc.orchestrator.checkpoint.follower import CheckpointFollower
from primerl_hpc.orchestrator.driver import RolloutDriver, failure_hint, process_limit
from primerl_hpc.orchestrator.evaluation import Evaluator
from primerl_hpc.orchestrator.progress import ProgressFile
from primerl_hpc.orchestrator.rollout_data import Outcome, Split, Start
from primerl_hpc.orchestrator.rollouts.environments import EnvHandle
from primerl_hpc.orchestrator.rollouts.runner import RolloutRunner
from primerl_hpc.orchestrator.scheduling.dispatcher import Dispatcher, DispatchLimits
from primerl_hpc.orchestrator.scheduling.sampler import TaskSampler
from primerl_hpc.orchestrator.setup import RouterAddress
from primerl_hpc.orchestrator.train_loop import Orchestrator, StoppedOnRequest
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.rollout import TrainEnvironment
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from tests.support.train_loop import (
    RecordedEnvironment,
    RecordingRunner,
    end_group,
    fail_group,
    make_handle,
    make_train_loop,
    synthetic_rollout,
)
from tests.unit.orchestrator.test_fleet import serving
from tests.unit.orchestrator.test_trajectories import episode, prompt, reply, trace
from tests.unit.transport.test_weights_delta import write_full


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(loop_module, "time", made)
    monkeypatch.setattr(driver_module, "time", made)
    return made


def waiting(tmp_path: Path, *, is_updating: bool) -> Orchestrator:
    """Return a loop two batches ahead of the live version, which became live at 0 s; it may wait 100 s."""
    made = make_train_loop(RunDir(tmp_path), recipe(max_steps=9, timeouts={"weights_s": 100}))
    made.dispatcher.policy_live(3)
    made.dispatcher.advance(6)
    made.driver.is_updating = is_updating
    made.watcher.waiting_since = 0.0
    return made


def test_no_timeout_blames_the_trainer_while_engines_load_a_version(tmp_path: Path, clock: Clock) -> None:
    made = waiting(tmp_path, is_updating=True)
    for clock.now in (1.0, 150.0, 900.0):
        made._check_gate()
    made.driver.is_updating = False
    with pytest.raises(TimeoutWaitingError, match="policy version 4"):
        made._check_gate()


def test_the_last_version_has_no_timeout_while_engines_load_it(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "TICK_S", 0.01)
    made = waiting(tmp_path, is_updating=True)

    def is_there() -> bool:
        clock.now += 60
        made.driver.is_updating = clock.now < 300
        return False

    with pytest.raises(TimeoutWaitingError, match="policy version 9"):
        asyncio.run(made._wait_until(is_there, "policy version 9"))
    assert clock.now == 300


@pytest.mark.parametrize(
    ("algorithms", "is_evaluating", "may_update"),
    [
        (["sft_distill", "sft_distill"], True, False),
        (["sft_distill", "sft_distill"], False, True),
        (["sft_distill", "grpo"], True, True),
        (["grpo"], True, True),
    ],
)
def test_an_evaluation_keeps_its_policy_version_if_a_teacher_samples_all_training_rollouts(
    tmp_path: Path, algorithms: list[str], is_evaluating: bool, may_update: bool
) -> None:
    train = [
        {"id": "reverse-text", "name": f"env-{index}", "algorithm": {"type": name}}
        for index, name in enumerate(algorithms)
    ]
    environments = {"train": train, "eval": [{"id": "held-out", "interval": 1}]}
    teacher = {"teacher": OWN} if "sft_distill" in algorithms else {}
    made = make_train_loop(RunDir(tmp_path), recipe(environments=environments, **teacher))
    if is_evaluating:
        made.driver.open_evaluation(1)
    assert made._may_update() is may_update


def fail(tmp_path: Path, clock: Clock, at: list[float]) -> None:
    """Engine faults at these seconds, without a success."""
    run = RunDir(tmp_path)
    made = RolloutDriver(run, recipe(), None, None, None, RouterAddress(run))  # type: ignore[arg-type]
    for clock.now in at:
        made._pause(ended("EnvServerDied: gone"))


def recipe(**more: Any) -> Recipe:
    values = {"kind": "rl", "name": "r", "model": {"name": "m"}, "max_steps": 1}
    environments = {"train": [{"id": "a"}], "eval": [{"id": "held-out", "interval": 1}]}
    return Recipe.model_validate({**values, "environments": environments, **more})


def ended(error: str, split: Split = Split.TRAIN) -> Outcome:
    env = "a" if split is Split.TRAIN else "held-out"
    return Outcome(0, split, env, "t", 0, None, error, is_engine_fault=True)


def test_two_faults_with_quiet_between_are_no_streak(tmp_path: Path, clock: Clock) -> None:
    fail(tmp_path, clock, [10.0, 1900.0])


def test_faults_one_after_another_without_a_success_end_the_run(tmp_path: Path, clock: Clock) -> None:
    fail(tmp_path, clock, [60.0 * minute for minute in range(31)])
    with pytest.raises(RoleError, match=r"no rollout succeeded for 1860 s.*see logs/latest/envs/train/a"):
        fail(tmp_path, clock, [60.0 * minute for minute in range(32)])


def test_an_outage_shorter_than_the_timeout_loses_no_group(tmp_path: Path, clock: Clock) -> None:
    run, made = RunDir(tmp_path), recipe()
    clock.now = 1.0
    tasks = TaskSampler([1000], [1.0], seed=0)
    dispatcher = Dispatcher(
        next_task=tasks.next,
        limits=DispatchLimits(group_size=8, batch_size=16, max_in_flight=32, max_off_policy_steps=1),
        last_step=9,
    )
    evaluator = Evaluator(made.environments, [1], 9, set())
    runner = RecordingRunner()
    driver = RolloutDriver(run, made, dispatcher, evaluator, runner, RouterAddress(run, "http://h"))  # type: ignore[arg-type]
    driver.open_evaluation(0)
    while clock.now < made.timeouts.inference_ready_s:
        driver.dispatch(0)
        for start in runner.started:
            outcome = replace(ended("TeacherError: refused", start.split), rollout_id=start.rollout_id)
            assert driver._group_of(outcome) is None
        runner.started.clear()
        clock.now += 1.0
    assert dispatcher.counters.groups_started == 5 and dispatcher.counters.groups_finished == 0


OPD, DISTILLED = {"algorithm": {"type": "opd"}}, {"algorithm": {"type": "sft_distill"}}
OWN, ELSEWHERE = {"model": {"name": "t"}}, {"model": {"name": "t"}, "base_url": "http://far/v1"}


@pytest.mark.parametrize(
    ("error", "more", "place"),
    [
        ("ProviderError: 503", {}, "logs/latest/inference/*.log"),
        ("NoRouter: down", {}, "logs/latest/inference/*.log"),
        ("EnvServerDied: gone", {}, "logs/latest/envs/train/a*"),
        (
            "EnvServerDied: gone",
            {"environments": {"train": [{"id": "a", "address": "tcp://h:1"}]}},
            "tcp://h:1",
        ),
        ("NoJudge: APITimeoutError", {"judge": OWN}, "logs/latest/judge/*.log"),
        ("NoJudge: APITimeoutError", {"judge": ELSEWHERE}, "http://far/v1"),
        ("NoJudge: APITimeoutError", {}, "the environment server's log"),
        ("TeacherError: refused", {**OPD, "teacher": OWN}, "logs/latest/teacher/*.log"),
        ("NoTeacher: down", {**OPD, "teacher": ELSEWHERE}, "http://far/v1"),
        ("ProviderError: 503", {**OPD, "teacher": OWN}, "logs/latest/inference/*.log"),
        ("ProviderError: 503", {**DISTILLED, "teacher": OWN}, "logs/latest/teacher/*.log"),
        ("TeacherError: refused", {"algorithm": {"type": "opsd"}}, "logs/latest/inference/*.log"),
    ],
)
def test_the_hint_of_an_outage_names_the_log_of_the_missing_server(
    error: str, more: dict, place: str
) -> None:
    assert place in failure_hint(recipe(**more), ended(error))


def test_progress_and_the_last_error_of_rollouts_are_written_every_few_seconds(
    tmp_path: Path, clock: Clock
) -> None:
    run, tasks = RunDir(tmp_path), TaskSampler([4], [1.0], seed=0)
    dispatcher = Dispatcher(
        next_task=tasks.next,
        limits=DispatchLimits(
            group_size=2, batch_size=2, max_in_flight=2, max_off_policy_steps=0, max_retries=0
        ),
        last_step=1,
    )
    runner = RolloutRunner(recipe(), {}, live_version=lambda: 0, router_url=lambda: None)
    driver = RolloutDriver(run, recipe(), dispatcher, None, runner, RouterAddress(run))  # type: ignore[arg-type]
    starts = dispatcher.next_starts(0)
    for start, error in zip(starts, ("TimeoutError: a", "HarnessError: no\x1b tools"), strict=True):
        group = driver._group_of(replace(ended(error), rollout_id=start.rollout_id, is_engine_fault=False))
    assert group is not None and group.errors == ["TimeoutError: a", "HarnessError: no\x1b tools"]
    clock.now = 1.0
    driver.dispatch(queued=5, dropped_batches=3)
    driver.flush()
    written = read_json(run.rollout_progress)
    (name,) = written["failures"]
    assert written["failures"][name] == {"count": 2, "of_kind": 1, "last": "HarnessError: no\\x1b tools"}
    counts = {key: written[key] for key in ("in_flight", "waiting", "finished", "failed", "dropped_batches")}
    assert counts == {"in_flight": 0, "waiting": 5, "finished": 0, "failed": 2, "dropped_batches": 3}
    for now, queued in ((2.0, 5), (7.0, 6)):
        clock.now = now
        driver.dispatch(queued=6)
        driver.flush()
        assert read_json(run.rollout_progress)["waiting"] == queued


def test_episodes_that_start_processes_are_bounded_by_the_cores_of_their_nodes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(name: str, *servers: dict, **fields: Any) -> EnvHandle:
        return make_handle(RunDir(tmp_path), TrainEnvironment(id=name, **fields), *servers)

    starts = {"processes": ["tool server echo_tools"], "cores": 8}
    envs = {
        Split.TRAIN: [
            handle("plain", {"processes": [], "cores": 8, "host": "a"}),
            handle("tools", starts | {"host": "a"}, starts | {"host": "a"}),
            handle("own-limit", starts | {"host": "a"}, max_concurrent=99),
            handle("by-address", {}, address="tcp://h:1"),
        ],
        Split.EVAL: [handle("tools", starts | {"host": "b", "cores": 4})],
    }
    limit = process_limit(envs)
    assert limit is not None and limit.envs == {(Split.TRAIN, 1), (Split.EVAL, 0)} and limit.rollouts == 12
    assert "limited to 12 concurrent episodes" in caplog.text and "tool server echo_tools" in caplog.text
    assert process_limit({Split.TRAIN: envs[Split.TRAIN][:1]}) is None


def test_rollouts_of_an_evaluation_are_the_policys_also_where_a_teacher_samples_for_training() -> None:
    made = failure_hint(recipe(**DISTILLED, teacher=OWN), ended("ProviderError: 503", Split.EVAL))
    assert "inference" in made


def test_progress_is_written_again_only_if_it_changed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    progress = ProgressFile(run)
    for waiting, is_written in ((1, True), (1, False), (2, True)):
        progress.note({"waiting": waiting})
        progress.flush()
        assert run.rollout_progress.exists() == is_written
        run.rollout_progress.unlink(missing_ok=True)


def test_a_requested_stop_is_seen_in_the_control_folder(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    follower = CheckpointFollower(run, "trainer-0")
    assert follower.stopped_at() is None and not follower.is_stopping
    write_json(run.stop_request, {})
    assert follower.stopped_at() is None and follower.is_stopping


def test_tasks_whose_group_is_stale_or_has_no_result_count_as_failed(tmp_path: Path) -> None:
    """Two of the four tasks are lost: one by failures, one because two batches were shipped before it ended."""
    only_unseen = {"type": "difficulty_pools", "hard_weight": 0, "normal_weight": 0, "easy_weight": 0}
    made = make_train_loop(
        RunDir(tmp_path),
        recipe(
            max_steps=9,
            rollouts={"group_size": 2, "batch_size": 2, "max_off_policy_steps": 1},
            environments={"train": [{"id": "reverse-text", "curriculum": only_unseen}]},
        ),
    )
    half = [synthetic_rollout(1.0), synthetic_rollout(0.0)]

    async def ship() -> None:
        made._build_batch()
        assert made._shipping is not None
        await made._shipping

    async def train() -> None:
        first, slow = _groups(made.dispatcher.next_starts(0))
        made._score(fail_group(made.dispatcher, first))
        for version in (0, 1):
            made.dispatcher.policy_live(version)
            (next_group,) = _groups(made.dispatcher.next_starts(0))
            made._score(end_group(made.dispatcher, next_group, half))
            await ship()
        assert not made.dispatcher.finished(slow[0].rollout_id, half[0])

    asyncio.run(train())
    assert made.dispatcher.counters.groups_cancelled == 1
    assert made.sampler.curricula[0].metrics() == {"unseen": 0, "hard": 2, "normal": 2, "easy": 0}


def _groups(starts: list[Start]) -> list[list[Start]]:
    return [list(group) for _, group in groupby(starts, key=lambda start: start.group_id)]


def test_interrupted_evaluations_finish_at_their_own_version_before_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = recipe()
    played = episode(trace([prompt([1, 2]), reply([9, 4], 0)]))
    tasks = [EnvironmentTask(key, {"prompt": key}) for key in "ab"]
    handle = EnvHandle(made.environments.eval[0], RecordedEnvironment(played), tasks)  # type: ignore[arg-type]

    async def check() -> None:
        async with serving(tmp_path, "inference-0") as (run, fleet, _):
            loop = make_train_loop(run, made, eval_handles=[handle], fleet=fleet, router_url="http://h")
            loop.dispatcher.advance(4)
            loop.dispatcher.policy_live(3)
            loop._checked_files_at = math.inf  # no router of the run publishes its address
            write_full(run, 1)
            write_full(run, 3)
            loop.evaluator.interrupted = [0, 1, 2]
            await loop._evaluate_interrupted()
            rows = read_steps(run.metrics("eval"))
            assert {version: row["eval/held-out/rollouts"] for version, row in rows.items()} == {0: 2, 1: 2}
            assert [row["eval/policy_version/max"] for row in rows.values()] == [0, 1]
            assert loop.dispatcher.in_flight == 0 and loop.sampler.epochs() == [0]
            await loop.runner.close()

    asyncio.run(check())
    assert "evaluation of policy v2 was interrupted" in caplog.text


def test_a_stop_names_the_evaluations_that_it_interrupts_and_the_command_that_finishes_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir(tmp_path / "my run")
    write_text(run.stop_request, "")
    write_json(run.outcome("trainer-0"), {"outcome": "stopped", "step": 0})
    made = make_train_loop(run, recipe())
    made.evaluator.interrupted = [10, 20]
    with pytest.raises(StoppedOnRequest):
        asyncio.run(made._check_files())
    assert f"primerl-hpc eval '{run.root}' --steps 10,20" in caplog.text
