"""The router: its engines are those that are there, only the run reaches it, and requests survive an engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from primerl_hpc.common.files import write_json
from primerl_hpc.common.names import Role
from primerl_hpc.inference.balancing import Balancer
from primerl_hpc.roles import router as router_module
from primerl_hpc.roles.router import Keeper, Router
from primerl_hpc.run.access.admission import Admission
from primerl_hpc.run.access.keys import RunKeys, run_keys
from primerl_hpc.run.endpoints import PublishedEngines, publish_endpoint
from primerl_hpc.run.ports import bind_listener
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import PATIENCE_S, wait_for_async

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def engine(keys: RunKeys, answer: Answer, name: str = "inference-0") -> AsyncIterator[str]:
    """A played engine with a certificate of ``keys``; yields its URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=keys.server_context(name, "127.0.0.1"))
    await site.start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def routing_to(
    run: RunDir, *engines: str, routing: str = "prefix", slack: int = 8
) -> AsyncIterator[tuple[Router, httpx.AsyncClient]]:
    keys = run_keys(run)
    with contextlib.closing(bind_listener("127.0.0.1", run.last_port("router-0"))) as listener:
        async with Router(run, keys, Balancer(routing, slack), Admission(expected=1024)).listening(
            "router-0", listener
        ) as router:
            router.change_engines(list(engines))
            url = f"https://127.0.0.1:{listener.getsockname()[1]}"
            async with httpx.AsyncClient(
                base_url=url,
                verify=keys.client_context(),
                headers=keys.headers,
                trust_env=False,
                timeout=PATIENCE_S,
                limits=httpx.Limits(max_connections=None),
            ) as client:
                yield router, client


async def say_ok(request: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": [], "path": request.path_qs})


def generate(tokens: list[int]) -> dict[str, Any]:
    return {"model": "m", "token_ids": tokens, "sampling_params": {"max_tokens": 1}}


async def ask(client: httpx.AsyncClient, tokens: list[int], session: str = "0.0") -> httpx.Response:
    headers = {"X-Session-ID": session}
    return await client.post("/inference/v1/generate", json=generate(tokens), headers=headers)


# -- membership ------------------------------------------------------------------------------------


def test_an_engine_whose_restart_was_requested_gets_no_requests(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    publish_endpoint(run, "inference-0", "https://h:1")
    publish_endpoint(run, "inference-1", "https://h:2")
    publish_endpoint(run, "router-0", "https://h:3")
    engines = PublishedEngines(run, Role.INFERENCE.value)
    assert engines.urls() == {"inference-0": "https://h:1", "inference-1": "https://h:2"}
    write_json(run.restart_request("inference-0"), {"reason": "does not take new weights"})
    engines.hurry()
    assert engines.urls() == {"inference-1": "https://h:2"}


def test_a_request_finds_an_engine_that_was_published_since_the_last_look(tmp_path: Path) -> None:
    async def respond(_: web.Request) -> web.Response:
        return web.json_response({"version": 0})

    async def check() -> None:
        run = RunDir(tmp_path)
        async with engine(run_keys(run), respond) as url, routing_to(run) as (router, client):
            keeper = Keeper(router, logging.getLogger("router"))
            await keeper.reconcile()
            keeper.published.endpoints._next_look = math.inf  # the next look of a long wait
            publish_endpoint(run, "inference-0", url)
            answers = await asyncio.gather(*(ask(client, [5]) for _ in range(4)))
            assert [answer.status_code for answer in answers] == [200] * 4 and router.engines == [url]

    asyncio.run(check())


@pytest.mark.parametrize(
    "status, state, joins",
    [
        (200, {"version": 3}, True),
        (200, {"version": 2}, False),
        (401, {"error": "key"}, False),
        (200, [], False),
        (200, {}, False),
    ],
)
def test_only_an_engine_at_the_live_version_joins_and_one_that_is_unpublished_leaves(
    tmp_path: Path, status: int, state: object, joins: bool
) -> None:
    async def say_state(_: web.Request) -> web.Response:
        return web.json_response(state, status=status)

    async def check() -> None:
        run = RunDir(tmp_path)
        async with engine(run_keys(run), say_state) as url, routing_to(run) as (router, _):
            publish_endpoint(run, "inference-0", url)
            write_json(run.live_version, {"version": 3})
            keeper = Keeper(router, logging.getLogger("router"))
            keeper.published.hurry()
            await keeper.reconcile()
            assert router.engines == ([url] if joins else [])
            run.endpoint("inference-1").mkdir()  # reading it is an OSError
            keeper.published.hurry()
            await keeper.reconcile()
            assert keeper.patience.is_failing
            run.endpoint("inference-1").rmdir()
            keeper.published.hurry()
            await keeper.reconcile()
            assert not keeper.patience.is_failing
            assert router.engines == ([url] if joins else [])
            run.endpoint("inference-0").unlink()
            keeper.published.hurry()
            await keeper.reconcile()
            assert router.engines == []

    asyncio.run(check())


# -- strangers -------------------------------------------------------------------------------------


def test_a_stranger_without_the_key_reaches_no_route_and_no_engine(tmp_path: Path) -> None:
    asked = []

    async def note(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response()

    async def check() -> None:
        run = RunDir(tmp_path)
        async with engine(run_keys(run), note) as url, routing_to(run, url) as (router, client):
            for wrong in ("", "Bearer x", run_keys(run).api_key):
                for path in ("/v1/models", "/health", "/metrics", "/list_workers", "/primerl/engines"):
                    assert (await client.get(path, headers={"Authorization": wrong})).status_code == 401
                for path in ("/add_worker?url=https://evil:1", "/remove_worker", "/flush_cache"):
                    assert (await client.post(path, headers={"Authorization": wrong})).status_code == 401
            for path in ("/add_worker?url=https://evil:1", "/pause", "/update_weights", "/%2e%2e/pause"):
                assert (await client.post(path)).status_code == 404, path
            for path in (
                b"/v1/../pause",
                b"/v1/%2e%2e/pause",
                b"/v1/x/../../pause",
                b"/v1/..%2fpause",
                b"//v1/x",
            ):
                raw = client.base_url.copy_with(
                    raw_path=path
                )  # unchanged: httpx would resolve the text of a URL
                assert (await client.post(raw)).status_code == 404, path
            assert router.engines == [url] and asked == []

    asyncio.run(check())


def test_a_process_that_took_an_engines_port_receives_no_request(tmp_path: Path) -> None:
    received = []

    async def note(request: web.Request) -> web.Response:
        received.append((dict(request.headers), await request.read()))
        return web.json_response({"version": 0})

    async def check() -> None:
        run, stranger = RunDir(tmp_path / "run"), run_keys(RunDir(tmp_path / "other"))
        async with engine(stranger, note) as url, routing_to(run, url) as (router, client):
            assert (await ask(client, [5])).status_code == 503
            publish_endpoint(run, "inference-0", url)
            router.change_engines([])
            await Keeper(router, logging.getLogger("router")).reconcile()
            assert router.engines == [] and received == []

    asyncio.run(check())


# -- requests --------------------------------------------------------------------------------------


def test_requests_pass_with_their_query_body_and_headers_and_so_do_responses(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    async def answer(request: web.Request) -> web.Response:
        seen.update(
            path=request.path_qs, session=request.headers.get("X-Session-ID"), body=await request.json()
        )
        return web.json_response({"a": 1}, status=207, headers={"x-primerl-policy-version": "4"})

    async def check() -> None:
        run = RunDir(tmp_path)
        async with engine(run_keys(run), answer) as url, routing_to(run, url) as (_, client):
            response = await client.post(
                "/v1/completions?x=1", json={"prompt": "é"}, headers={"X-Session-ID": "s"}
            )
            assert (response.status_code, response.json()) == (207, {"a": 1})
            assert response.headers["x-primerl-policy-version"] == "4"
            assert seen == {"path": "/v1/completions?x=1", "session": "s", "body": {"prompt": "é"}}
            assert (await client.get("/primerl/engines")).json() == {"engines": [url]}

    asyncio.run(check())


def test_a_stream_arrives_as_it_is_made_and_ends_at_the_engine_when_the_client_leaves(tmp_path: Path) -> None:
    goes_on, left = asyncio.Event(), asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            await response.write(b"data: 1\n\n")
            await goes_on.wait()
            await response.write(b"data: 2\n\n")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            left.set()
            raise
        return response

    async def check() -> None:
        run = RunDir(tmp_path)
        async with engine(run_keys(run), stream) as url, routing_to(run, url) as (router, client):
            async with client.stream("POST", "/v1/completions", json={"prompt": "a"}) as response:
                lines = response.aiter_lines()
                assert await anext(lines) == "data: 1"
                goes_on.set()
                assert await anext(lines) == ""
                assert await anext(lines) == "data: 2"
                assert router.balancer.in_flight[url] == 1
            await asyncio.wait_for(left.wait(), PATIENCE_S)
            await wait_for_async(lambda: not router.balancer.in_flight, "the end of the request")

    asyncio.run(check())


def test_a_request_goes_to_another_engine_when_its_first_one_has_ended(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        asked.set()
        await asyncio.Event().wait()
        return web.Response()

    async def check() -> None:
        run = RunDir(tmp_path)
        keys = run_keys(run)
        async with (
            engine(keys, hang) as lost,
            engine(keys, say_ok) as good,
            routing_to(run, lost) as (router, client),
        ):
            call = asyncio.create_task(ask(client, [5]))
            await asyncio.wait_for(asked.wait(), PATIENCE_S)
            router.engines = [lost, good]
            router.change_engines([good])  # its node is lost: no packet will come
            assert (await asyncio.wait_for(call, PATIENCE_S)).status_code == 200
        async with engine(keys, say_ok) as good, routing_to(run, lost, good) as (router, client):
            # no process listens at the lost one's port
            answers = [await ask(client, [number]) for number in range(4)]
            assert [answer.status_code for answer in answers] == [200] * 4
            router.change_engines([])
            empty = await ask(client, [5])
            assert (empty.status_code, empty.json()) == (503, {"error": "no engine is ready"})

    asyncio.run(check())


def test_an_engine_that_fails_everything_is_left_out_while_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "FAILURES", 3)
    count: Counter[str] = Counter()

    async def fail(_: web.Request) -> web.Response:
        count["bad"] += 1
        return web.json_response({"error": "CUDA"}, status=500)

    async def check() -> None:
        run = RunDir(tmp_path)
        keys = run_keys(run)
        async with engine(keys, fail) as bad, engine(keys, say_ok) as good:
            async with routing_to(run, bad, good, routing="session") as (_, client):
                answers = [await ask(client, [1], f"{number}") for number in range(60)]
                assert count["bad"] == 3 == sum(answer.status_code == 500 for answer in answers)
            async with routing_to(run, bad) as (
                _,
                client,
            ):  # alone it stays: its errors say more than none would
                assert [(await ask(client, [1])).status_code for _ in range(8)] == [500] * 8

    asyncio.run(check())


GROUPS, GROUP_SIZE, TURNS = 12, 4, 3


@pytest.mark.parametrize("routing", ["prefix", "session"])
def test_the_turns_of_a_rollout_meet_at_one_engine_and_by_prefix_the_rollouts_of_a_group_too(
    tmp_path: Path, routing: str
) -> None:
    pick = random.Random(0)
    prompts = [pick.choices(range(50_000), k=200) for _ in range(GROUPS)]
    asked: list[set[str]] = [set(), set()]
    have_begun: list[str] = []
    all_have_begun = asyncio.Event()

    def engine_that_notes(mine: set[str]) -> Answer:
        async def answer(request: web.Request) -> web.Response:
            rollout = request.headers["X-Session-ID"]
            if rollout.endswith(".0") and rollout not in mine:
                have_begun.append(rollout)
                if len(have_begun) == GROUPS:
                    all_have_begun.set()
                await all_have_begun.wait()
            mine.add(rollout)
            return web.json_response({"choices": []})

        return answer

    async def play(client: httpx.AsyncClient, rollout: str, prompt: list[int]) -> None:
        tokens = list(prompt)
        for turn in range(TURNS):
            (await ask(client, tokens, rollout)).raise_for_status()
            tokens += [turn] * 50

    async def check() -> None:
        run = RunDir(tmp_path)
        keys = run_keys(run)
        first, second = (engine(keys, engine_that_notes(mine)) for mine in asked)
        async with (
            first as a,
            second as b,
            routing_to(run, a, b, routing=routing, slack=GROUPS) as (_, client),
        ):
            for member in range(GROUP_SIZE):
                rollouts = [f"{group}.{member}" for group in range(GROUPS)]
                plays = (play(client, *pair) for pair in zip(rollouts, prompts, strict=True))
                await asyncio.wait_for(asyncio.gather(*plays), PATIENCE_S)

    asyncio.run(check())
    first, second = asked
    assert len(first | second) == GROUPS * GROUP_SIZE and not first & second
    groups = [{rollout.split(".")[0] for rollout in mine} for mine in asked]
    assert bool(groups[0] & groups[1]) == (routing == "session")
    assert min(map(len, groups)) >= GROUPS / 4


def test_a_process_takes_its_old_port_again_and_another_where_it_is_taken(tmp_path: Path) -> None:
    memory = tmp_path / "inference-0.json"
    first = bind_listener("127.0.0.1", memory)
    port = first.getsockname()[1]
    first.close()
    again = bind_listener("127.0.0.1", memory)
    assert again.getsockname()[1] == port
    again.listen()
    other = bind_listener("127.0.0.1", memory)
    assert other.getsockname()[1] != port
    for listener in (again, other):
        listener.close()
