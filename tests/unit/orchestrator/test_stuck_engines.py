"""An engine that has requests and generates no token is detected, and no other engine is."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import Role
from primerl_hpc.orchestrator.engines import load_monitor as engines
from primerl_hpc.orchestrator.engines.load_monitor import EngineMonitor, StuckDetector, tokens_between
from primerl_hpc.orchestrator.eval_loop import run_evaluation
from primerl_hpc.orchestrator.rollout_data import TaskRef
from primerl_hpc.orchestrator.scheduling.dispatcher import Dispatcher, DispatchLimits
from primerl_hpc.run.endpoints import publish_endpoint
from tests.support.helpers import make_plan, process_plan, wait_for_async
from tests.unit.orchestrator.test_env_client import played
from tests.unit.orchestrator.test_fleet import serving

METRICS = """\
vllm:num_requests_running{{engine="0"}} {running}
vllm:generation_tokens_total{{engine="0"}} {tokens}
"""


def look(detector: StuckDetector, now: float, running: float, tokens: float) -> list[str]:
    return detector.update(now, {"inference-0": {"running": running, "generation_tokens": tokens}})


def test_an_engine_is_stuck_after_the_limit_and_named_once() -> None:
    detector = StuckDetector(10)
    named = [now for now in range(0, 31, 2) if look(detector, now, 3, 500)]
    assert named == [12, 24]


def test_tokens_are_counted_of_engines_that_both_looks_saw() -> None:
    before = {"stays": 100.0, "leaves": 900.0, "restarts": 800.0}
    assert tokens_between(before, {"stays": 130.0, "restarts": 5.0, "comes back": 5000.0}) == 30.0


@given(st.lists(st.tuples(st.floats(0.1, 9), st.booleans()), min_size=1, max_size=40))
def test_an_engine_that_works_or_has_nothing_to_do_is_never_stuck(looks: list[tuple[float, bool]]) -> None:
    detector, now, tokens = StuckDetector(10), 0.0, 0
    for pause_s, works in looks:
        now, tokens = now + pause_s, tokens + works
        assert not look(detector, now, running=float(works), tokens=tokens)


def test_time_that_engines_were_paused_or_away_does_not_count() -> None:
    detector = StuckDetector(10)
    assert not look(detector, 0, 3, 500) and not look(detector, 9, 3, 500)
    detector.reset()
    assert not look(detector, 20, 3, 500) and not look(detector, 29, 3, 500)
    assert not detector.update(35, {})
    assert not look(detector, 40, 3, 500)


def test_the_supervisor_is_requested_to_restart_a_stuck_engine(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(engines, "POLL_S", 0.01)
    dispatcher = Dispatcher(
        next_task=lambda: TaskRef(0, 0),
        limits=DispatchLimits(group_size=1, batch_size=1, max_in_flight=1, max_off_policy_steps=1),
        last_step=1,
    )

    async def check() -> None:
        async with serving(tmp_path, "inference-0", "inference-1", "teacher-0") as (run, fleet, engines_):
            stuck, idle, teacher = engines_
            teacher.metrics = METRICS.format(running=1, tokens=5)
            stuck.metrics = METRICS.format(running=2, tokens=77)
            idle.metrics = METRICS.format(running=0, tokens=1)
            watch = EngineMonitor(
                fleet,
                dispatcher,
                None,
                is_updating=lambda: False,
                cancel_youngest_rollouts=lambda count: None,
                stuck_after_s=0.1,
                frozen=[Role.TEACHER],
            )
            task = asyncio.create_task(watch.watch())
            for name in ("inference-0", "teacher-0"):
                await wait_for_async(run.restart_request(name).exists, f"a request for {name}")
            task.cancel()
            asked = read_json(run.restart_request("inference-0"))
            assert asked["process"] == "inference-0" and "no token" in asked["reason"]
            assert not run.restart_request("inference-1").exists()
            assert watch.take_metrics()["inference/idle"] == 0.5

    asyncio.run(check())


def test_an_evaluation_asks_for_the_successors_of_its_engine_and_of_its_judges(
    tmp_path: Path, monkeypatch
) -> None:
    """Both say that they are well, have requests, and make no token."""
    monkeypatch.setattr(engines, "POLL_S", 0.01)

    async def check() -> None:
        async with played() as (_, port), serving(tmp_path, "inference-0", "judge-0") as (run, _, stuck):
            for engine in stuck:
                engine.metrics = METRICS.format(running=2, tokens=77)
            publish_endpoint(run, "router-0", "http://127.0.0.1:1")
            environment = {"id": "reverse-text", "num_tasks": 1, "address": f"tcp://127.0.0.1:{port}"}
            recipe = {
                "kind": "eval",
                "name": "stuck",
                "model": {"name": "m"},
                "seq_len": 1024,
                "environments": {"eval": [environment]},
                "judge": {"model": {"name": "j"}},
            }
            roles = (Role.INFERENCE, Role.JUDGE, Role.ROUTER, Role.EVALUATOR)
            (phase,) = make_plan(run.root, recipe, processes=[process_plan(role) for role in roles]).phases
            timeouts = phase.recipe.timeouts.model_copy(update={"health_s": 0.1})
            recipe = phase.recipe.model_copy(update={"timeouts": timeouts})
            task = asyncio.create_task(run_evaluation(run, phase.model_copy(update={"recipe": recipe})))
            for name in ("inference-0", "judge-0"):
                request = run.restart_request(name)
                await wait_for_async(
                    lambda request=request: task.done() or request.exists(), f"a request for {name}"
                )
                assert not task.done(), task.result()
            task.cancel()
            await asyncio.wait({task})

    asyncio.run(check())
