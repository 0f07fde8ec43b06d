"""Stand-alone evaluation of one model (kind eval): every eval environment once, then done."""

from __future__ import annotations

import asyncio

from primerl_hpc.common.rundir import RunDir
from primerl_hpc.orchestrator.dispatcher import Dispatcher, Split
from primerl_hpc.orchestrator.driver import RolloutDriver, env_limits, env_rates
from primerl_hpc.orchestrator.evals import Evaluator
from primerl_hpc.orchestrator.runner import RolloutRunner
from primerl_hpc.orchestrator.sampler import TaskRef
from primerl_hpc.orchestrator.setup import (
    RouterAddress,
    load_environments,
    make_fleet,
    wait_for_peers,
)
from primerl_hpc.plan.types import PhasePlan

MAX_IN_FLIGHT = 256


async def run_evaluation(run: RunDir, phase: PhasePlan) -> None:
    """Evaluate ``phase.model_path`` as version 0 and write its row to metrics/eval.jsonl."""
    recipe = phase.recipe
    fleet, router = make_fleet(run, recipe), RouterAddress(run)
    envs = await load_environments(run, recipe)
    await wait_for_peers(phase, envs, fleet, router)
    dispatcher = Dispatcher(
        next_task=_no_task,
        group_size=1,
        batch_size=1,
        max_in_flight=recipe.rollouts.max_in_flight or MAX_IN_FLIGHT,
        max_off_policy_steps=0,
        last_step=0,
        env_limits=env_limits(envs),
        env_rates=env_rates(envs),
    )
    evaluator = Evaluator(recipe.environments, [len(handle.tasks) for handle in envs[Split.EVAL]], 0, set())
    runner = RolloutRunner(recipe, envs, live_version=lambda: 0, router_url=lambda: router.url)
    driver = RolloutDriver(run, recipe, dispatcher, evaluator, runner, router)
    try:
        driver.open_evaluation(0)
        while evaluator.num_open:
            driver.dispatch(queued=0)
            await driver.next_groups()
            await asyncio.to_thread(router.refresh)
            await asyncio.to_thread(driver.flush)
    finally:
        driver.flush()
        await runner.close()
        await fleet.close()


def _no_task() -> TaskRef:
    raise AssertionError("evaluation draws no training task")
