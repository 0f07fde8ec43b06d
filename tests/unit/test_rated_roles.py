"""The engines of known speed in tools/bench: what the comparison of the simulator with real runs rests on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import ClientSession, web

from primerl_hpc.plan.simulation.lengths import Lengths
from tests.support.helpers import wait_for_async
from tools.bench.rated_roles import RatedEngine, engine_app, engine_side, make_runner

VALUES: dict[str, Any] = {"max_running": 2, "curve": ((1.0, 0.01),), "turns": 1, "pause_s": 0.0}


async def until_running(engine: RatedEngine, running: int, waiting: int) -> None:
    def has_them() -> bool:
        return (len(engine.running), len(engine.waiting)) == (running, waiting)

    await wait_for_async(has_them, f"{running} running and {waiting} waiting")


@pytest.mark.slow
def test_a_sequence_ends_when_its_client_disconnects() -> None:
    """A cancelled rollout that continued would keep its engine busy and slow the others, which vLLM does not do."""

    async def scenario() -> RatedEngine:
        engine = RatedEngine(engine_side(VALUES), Lengths.constant(1e6), seed=0)
        runner = make_runner(engine_app(engine, VALUES, "inference-0", "policy"))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        async with ClientSession() as client:
            url = f"http://{host}:{port}/inference/v1/generate"
            requests = [asyncio.create_task(client.post(url, json={})) for _ in range(3)]
            await until_running(engine, 2, 1)
            for running, waiting in ((2, 0), (1, 0), (0, 0)):
                requests.pop(0).cancel()
                await until_running(engine, running, waiting)
        await runner.cleanup()
        return engine

    engine = asyncio.run(scenario())
    assert (engine.aborted, engine.requests) == (3, 0)
