"""Levels of load: a fixed number of requests in flight (closed loop), or a fixed rate of arrivals (open loop).

In a closed loop a slow server is sent fewer requests; it measures the throughput of a known concurrency, as of rollouts
in flight. In an open loop arrivals do not depend on the server; above its capacity the queue and TTFT grow.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from primerl_hpc.inference.load.timing import RequestTimes, summarize_engines, summarize_requests
from primerl_hpc.plan.bench_plans import TOKEN_IDS, LoadRequest, draw_lengths

Send = Callable[[list[int], int], Awaitable[RequestTimes]]
Look = Callable[[], Awaitable[dict[str, dict[str, float]]]]
LOOK_EVERY_S = 0.25


async def measure_levels(
    request: LoadRequest, send: Send, look: Look, report: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Run all levels, one after another. ``look`` reads the engines' metrics; ``report`` is called with each result."""
    levels: list[dict[str, Any]] = []
    for is_open, values in ((False, request.concurrency), (True, request.rates)):
        for value in values:
            seed = request.seed + len(levels)
            work = draw_requests(request, request.num_requests(value, is_open=is_open), seed=seed)
            run = (
                run_open(work, send, rate=value, seed=seed) if is_open else run_closed(work, send, int(value))
            )
            times, samples = await _watched(run, look)
            level = {"loop": "open", "rate": value} if is_open else {"loop": "closed", "concurrency": value}
            levels.append(level | summarize_requests(times) | summarize_engines(samples))
            report(levels[-1])
    return levels


def draw_requests(request: LoadRequest, count: int, *, seed: int) -> list[tuple[list[int], int]]:
    """Return (prompt, number of output tokens) of ``count`` requests. Prompts are random, so they share no prefix."""
    generator = random.Random(seed)
    prompts = draw_lengths(request.prompt_tokens, count, seed=seed)
    outputs = draw_lengths(request.output_tokens, count, seed=seed + 1)
    return [
        ([generator.choice(TOKEN_IDS) for _ in range(length)], output)
        for length, output in zip(prompts, outputs, strict=True)
    ]


async def run_closed(work: list[tuple[list[int], int]], send: Send, concurrency: int) -> list[RequestTimes]:
    """Send all requests with ``concurrency`` of them in flight."""
    waiting, done = iter(work), []

    async def keep_one_in_flight() -> None:
        for prompt, num_output in waiting:
            done.append(await send(prompt, num_output))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(work))):
            group.create_task(keep_one_in_flight())
    return done


async def run_open(
    work: list[tuple[list[int], int]], send: Send, *, rate: float, seed: int
) -> list[RequestTimes]:
    """Send requests at the times of a Poisson process of ``rate`` per second."""
    loop, generator = asyncio.get_running_loop(), random.Random(seed)
    due, tasks = loop.time(), []
    async with asyncio.TaskGroup() as group:
        for prompt, num_output in work:
            await asyncio.sleep(max(0.0, due - loop.time()))
            tasks.append(group.create_task(_send(send, prompt, num_output)))
            due += generator.expovariate(rate)
    return [task.result() for task in tasks]


async def _send(send: Send, prompt: list[int], num_output: int) -> RequestTimes:
    return await send(prompt, num_output)


async def _watched(
    run: Awaitable[list[RequestTimes]], look: Look
) -> tuple[list[RequestTimes], list[dict[str, dict[str, float]]]]:
    """Await ``run`` while reading the engines' metrics; return both."""
    samples: list[dict[str, dict[str, float]]] = [await look()]
    task = asyncio.ensure_future(run)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=LOOK_EVERY_S)
            samples.append(await look())
        return task.result(), samples
    finally:
        task.cancel()
