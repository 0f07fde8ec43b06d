"""What the orchestrator's loop decides by the clock, and whom it tells of tasks that came to nothing."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primerl_hpc.common.errors import RoleError, TimeoutWaitingError
from primerl_hpc.common.files import write_json, write_text
from primerl_hpc.common.metrics import read_steps
from primerl_hpc.common.patience import Patience
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.envs.tasks import EnvironmentTask
from primerl_hpc.orchestrator import driver as driver_module
from primerl_hpc.orchestrator import loop as loop_module
from primerl_hpc.orchestrator.checkpoints import CheckpointFollower
from primerl_hpc.orchestrator.dispatcher import Cancel, Dispatcher, Group, Split, Start
from primerl_hpc.orchestrator.driver import RolloutDriver, where_to_look
from primerl_hpc.orchestrator.engines import EngineWatch
from primerl_hpc.orchestrator.evals import Evaluator
from primerl_hpc.orchestrator.loop import Orchestrator, StoppedOnRequest
from primerl_hpc.orchestrator.runner import EnvHandle, Outcome, RolloutRunner
from primerl_hpc.orchestrator.sampler import TaskRef, TaskSampler
from primerl_hpc.orchestrator.setup import RouterAddress
from primerl_hpc.orchestrator.watcher import WeightWatcher
from primerl_hpc.recipe.schema import Recipe
from primerl_hpc.recipe.selection_schema import DifficultyPools
from primerl_hpc.transport.weights_filesystem import FilesystemWeightReader
from tests.unit.test_fleet import serving
from tests.unit.test_teacher import Environment
from tests.unit.test_trajectories import episode, prompt, reply, trace
from tests.unit.test_weights_delta import write_whole


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


def orchestrator(**parts) -> Orchestrator:
    """Without its start-up: only ``parts`` are there."""
    made = Orchestrator.__new__(Orchestrator)
    vars(made).update(parts)
    return made


def waiting(*, is_updating: bool) -> Orchestrator:
    """Two batches ahead of the last live version, which came at 0 s; 100 s are allowed."""
    return orchestrator(
        recipe=SimpleNamespace(timeouts=SimpleNamespace(weights_s=100)),
        dispatcher=SimpleNamespace(lead=2, max_off_policy_steps=1, version=3),
        driver=SimpleNamespace(is_updating=is_updating),
        watcher=SimpleNamespace(waiting_since=0.0),
        _closed_since=None,
        _closed_s=0.0,
    )


def test_a_version_that_is_written_and_waits_for_engines_is_not_the_trainers_fault(clock: Clock) -> None:
    made = waiting(is_updating=True)
    for clock.now in (1.0, 150.0, 900.0):
        made._watch_gate()
    made.driver.is_updating = False
    with pytest.raises(TimeoutWaitingError, match="policy version 4"):
        made._watch_gate()


def test_the_end_too_waits_for_engines_that_load_the_last_version(clock: Clock) -> None:
    made = waiting(is_updating=True)

    async def turn() -> None:
        clock.now += 60
        made.driver.is_updating = clock.now < 300

    made._turn = turn  # type: ignore[method-assign]
    with pytest.raises(TimeoutWaitingError, match="policy version 9"):
        asyncio.run(made._until(lambda: False, "policy version 9"))
    assert clock.now == 300


@pytest.mark.parametrize(
    ("sources", "num_open", "may_update"),
    [
        (["teacher", "teacher"], 1, False),
        (["teacher", "teacher"], 0, True),
        (["teacher", "policy"], 1, True),
        (["policy"], 1, True),
    ],
)
def test_an_evaluation_keeps_its_policy_where_no_training_rollout_needs_the_next(
    sources: list[str], num_open: int, may_update: bool
) -> None:
    made = orchestrator(
        recipe=SimpleNamespace(algorithms=[SimpleNamespace(samples_from=source) for source in sources]),
        evaluator=SimpleNamespace(num_open=num_open),
    )
    assert made._may_update() is may_update


def fail(tmp_path: Path, clock: Clock, at: list[float]) -> None:
    """Engine faults at these seconds, without a success."""
    made = RolloutDriver(RunDir(tmp_path), recipe(), None, None, None, None)  # type: ignore[arg-type]
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
        group_size=8,
        batch_size=16,
        max_in_flight=32,
        max_off_policy_steps=1,
        last_step=9,
    )
    evaluator = Evaluator(made.environments, [1], 9, set())
    started: list[Start] = []
    runner = SimpleNamespace(start=started.append, wake=lambda: None)
    driver = RolloutDriver(run, made, dispatcher, evaluator, runner, RouterAddress(run, "http://h"))  # type: ignore[arg-type]
    driver.open_evaluation(0)
    while clock.now < made.timeouts.inference_ready_s:
        driver.dispatch(0)
        for start in started:
            outcome = replace(ended("TeacherError: refused", start.split), rollout_id=start.rollout_id)
            assert driver._group_of(outcome) is None
        started.clear()
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
def test_a_run_that_nobody_answers_names_the_log_of_who_was_away(error: str, more: dict, place: str) -> None:
    assert place in where_to_look(recipe(**more), ended(error))


def test_rollouts_of_an_evaluation_are_the_policys_also_where_a_teacher_samples_for_training() -> None:
    made = where_to_look(recipe(**DISTILLED, teacher=OWN), ended("ProviderError: 503", Split.EVAL))
    assert "inference" in made


def test_tasks_whose_group_is_stale_or_has_no_survivor_are_missed() -> None:
    sampler = TaskSampler([4], [1.0], seed=0, curricula=[DifficultyPools()])
    stale, lost = sampler.next(), sampler.next()
    cancelled: list[Cancel] = []
    made = orchestrator(
        sampler=sampler,
        dispatcher=SimpleNamespace(
            step=1, min_fresh_version=0, advance=lambda step: [Cancel(0, (1,), "stale", stale)]
        ),
        cutter=SimpleNamespace(take=lambda *_: SimpleNamespace(), add=lambda group: None, queue=[]),
        state=SimpleNamespace(take=dict),
        follower=SimpleNamespace(remember=lambda *_: None),
        driver=SimpleNamespace(cancel=cancelled.extend),
        runner=SimpleNamespace(wake=lambda: None),
    )
    made._score(Group(1, Split.TRAIN, lost.env, lost.index, 2, to_start=0, retries_left=0))

    async def ship(cut: object) -> None:
        pass

    made._ship = ship  # type: ignore[method-assign]

    async def cut() -> None:
        made._cut()
        await made._shipping

    asyncio.run(cut())
    assert [cancel.task for cancel in cancelled] == [TaskRef(0, stale.index)]
    assert sampler.curricula[0].metrics() == {"unseen": 2, "hard": 2, "normal": 0, "easy": 0}


def test_evaluations_that_were_cut_off_are_done_at_their_own_version_before_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = recipe()
    played = episode(trace([prompt([1, 2]), reply([9, 4], 0)]))
    tasks = [EnvironmentTask(key, {"prompt": key}) for key in "ab"]
    handle = EnvHandle(made.environments.eval[0], Environment(played), tasks)  # type: ignore[arg-type]

    async def check() -> None:
        async with serving(tmp_path, "inference-0") as (run, fleet, _):
            envs = {Split.TRAIN: [], Split.EVAL: [handle]}
            dispatcher = Dispatcher(
                next_task=lambda: pytest.fail("the gate is closed"),
                group_size=1,
                batch_size=1,
                max_in_flight=1,
                max_off_policy_steps=1,
                last_step=9,
                step=4,
                version=3,
            )
            evaluator = Evaluator(made.environments, [2], 9, set())
            runner = RolloutRunner(
                made, envs, live_version=lambda: dispatcher.version, router_url=lambda: "http://h"
            )
            driver = RolloutDriver(run, made, dispatcher, evaluator, runner, RouterAddress(run, "http://h"))
            life = orchestrator(
                evaluator=evaluator,
                dispatcher=dispatcher,
                driver=driver,
                runner=runner,
                cutter=SimpleNamespace(num_queued=0),
                _last_look=math.inf,
            )
            life.watcher = WeightWatcher(
                run,
                fleet,
                FilesystemWeightReader(run),
                base_model="/base",
                engines_timeout_s=60,
                next_version=lambda _, newest: newest,
                on_pending=life._on_pending,
                on_live=life._on_live,
            )
            life.engines = EngineWatch(
                fleet,
                dispatcher,
                None,
                is_updating=lambda: False,
                take_back=lambda count: None,
                stuck_after_s=60,
            )
            write_whole(run, 1)
            write_whole(run, 3)
            evaluator.missed = [0, 1, 2]
            await life._evaluate_missed()
            rows = read_steps(run.metrics("eval"))
            assert {version: row["eval/held-out/rollouts"] for version, row in rows.items()} == {0: 2, 1: 2}
            assert [row["eval/policy_version/max"] for row in rows.values()] == [0, 1]
            await runner.close()

    asyncio.run(check())
    assert "policy v2 was not evaluated to the end" in caplog.text


def test_a_stop_names_the_evaluations_that_it_cuts_off_and_what_would_do_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir(tmp_path / "my run")
    write_text(run.stop_request, "")
    write_json(run.outcome("trainer-0"), {"outcome": "stopped", "step": 0})
    made = orchestrator(
        run=run,
        driver=SimpleNamespace(flush=lambda: None, router=RouterAddress(run)),
        distillation=SimpleNamespace(teacher=None),
        evaluator=SimpleNamespace(unfinished=[10, 20]),
        follower=CheckpointFollower(run, "trainer-0"),
        _patience=Patience("the traces"),
        _last_look=-math.inf,
        _following=None,
    )
    with pytest.raises(StoppedOnRequest):
        asyncio.run(made._look_at_files())
    assert f"primerl-hpc eval '{run.root}' --steps 10,20" in caplog.text
