"""Remote prefill: selection of requests and engines, with local prefill as the fallback. Engines are simulated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from primerl_hpc.common.files import write_json
from primerl_hpc.inference import prefill, routes
from primerl_hpc.inference.prefill import prefill_request
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.endpoints import publish_endpoint, read_endpoint
from primerl_hpc.run.rundir import VERSION_HEADER, RunDir
from tests.support.helpers import PATIENCE_S, wait_for_async

GENERATE = "/inference/v1/generate"
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}
BODY = {
    "token_ids": [1, 2, 3],
    "sampling_params": {"max_tokens": 9, "logprobs": 1, "seed": 4},
    "cache_salt": "7",
}


def test_the_prefill_request_has_the_same_prompt_and_one_token() -> None:
    assert prefill_request(GENERATE, BODY | {"stream": True}) == {
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 1, "seed": 4},
        "cache_salt": "7",
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    text = [{"type": "text", "text": "a"}]
    chat = {
        "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "b"}],
        "max_completion_tokens": 7,
        "min_tokens": 3,
        "top_logprobs": 2,
    }
    asked = prefill_request(
        "/v1/chat/completions", chat | {"stream": True, "stream_options": {}, "tools": []}
    )
    assert asked is not None and {*asked} == {"messages", "max_tokens", "tools", "kv_transfer_params"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, None),
        (GENERATE, [1]),
        (GENERATE, {"token_ids": [1]}),
        ("/v1/completions", {"messages": 5, "max_tokens": 1}),
        (GENERATE, {"token_ids": [1], "sampling_params": {"max_tokens": 1}}),
        (GENERATE, {"token_ids": [1], "sampling_params": {"n": 2}}),
        (GENERATE, {"token_ids": [1], "sampling_params": {"prompt_logprobs": 0}}),
        (GENERATE, BODY | {"kv_transfer_params": {"do_remote_decode": True}}),
        (GENERATE, BODY | {"features": {"mm_hashes": {"image": ["x"]}}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/completions", {"prompt": [[1], [2]]}),
        ("/v1/completions", {"prompt": "a", "echo": True}),
        ("/v1/chat/completions", {"messages": [], "max_completion_tokens": 1}),
    ],
)
def test_unsupported_requests_are_prefilled_locally(path: str, body: Any) -> None:
    assert prefill_request(path, body) is None


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve())
    await wait_for_async(lambda: server.started, "uvicorn")
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await task


class Other:
    """Simulated prefill engine with its received requests and its responses."""

    key: str

    def __init__(self, status: int = 200, version: int = 3) -> None:
        self.asked: list[dict[str, Any]] = []
        self.status, self.version = status, version
        self.hangs = asyncio.Event()
        self.hangs.set()
        self.left = asyncio.Event()

    async def answer(self, request: Request) -> JSONResponse:
        assert request.headers["authorization"] == f"Bearer {self.key}"
        self.asked.append(await request.json())
        while not self.hangs.is_set():
            if await request.is_disconnected():
                self.left.set()
                break
            await asyncio.sleep(0.005)
        return JSONResponse({"kv_transfer_params": PARAMS}, self.status, {VERSION_HEADER: str(self.version)})


class Decoding:
    """The real middleware around a simulated vLLM, with simulated prefill engines that are published in the run."""

    def __init__(self, run: RunDir, url: str, client: httpx.AsyncClient, others: dict[str, Other]) -> None:
        self.run, self.url, self.client, self.others = run, url, client, others
        self.seen: list[dict[str, Any]] = []
        self.given_back: list[dict[str, Any]] = []

    async def ask(self, body: dict[str, Any] = BODY, session: str = "a") -> httpx.Response:
        headers = {**run_keys(self.run).headers, "X-Session-ID": session}
        return await self.client.post(f"{self.url}{GENERATE}", json=body, headers=headers)

    async def notify_kv_transfer_request_rejected(self, request_id: str, params: dict[str, Any]) -> None:
        self.given_back.append(params)


@asynccontextmanager
async def decoding(tmp_path: Path, **others: Other) -> AsyncIterator[Decoding]:
    run = RunDir(tmp_path)
    async with all_listening(others) as urls, httpx.AsyncClient(timeout=PATIENCE_S) as client:
        for name, url in urls.items():
            others[name].key = run_keys(run).api_key
            publish_endpoint(run, name.replace("_", "-"), url)
        routes.install(
            routes.EngineState("inference-0", 1, 0, 3, api_key=run_keys(run).api_key, prefill_run=run)
        )
        system = Decoding(run, "", client, others)

        async def answer(request: Request) -> JSONResponse:
            raw = await request.body()
            assert len(raw) == int(request.headers["content-length"])
            system.seen.append(json.loads(raw))
            return JSONResponse({"ok": True})

        app = Starlette(routes=[Route(GENERATE, answer, methods=["POST"])])
        app.state.engine_client = system
        app.add_middleware(routes.EngineRoutes)
        async with listening(app) as system.url:
            yield system


@asynccontextmanager
async def hanging(tmp_path: Path) -> AsyncIterator[tuple[Decoding, Other, asyncio.Task[httpx.Response]]]:
    """Yield the hanging prefill engine and the request that it received."""
    other = Other()
    other.hangs.clear()
    async with decoding(tmp_path, prefill_0=other) as system:
        asked = asyncio.create_task(system.ask())
        await wait_for_async(lambda: other.asked, "the request")
        yield system, other, asked


@asynccontextmanager
async def all_listening(others: dict[str, Other]) -> AsyncIterator[dict[str, str]]:
    async with AsyncExitStack() as stack:
        urls = {}
        for name, other in others.items():
            app = Starlette(routes=[Route(GENERATE, other.answer, methods=["POST"])])
            urls[name] = await stack.enter_async_context(listening(app))
        yield urls


def run_it(check: Callable[[], Any]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await check()

    asyncio.run(bounded())


def test_a_session_uses_one_engine_and_vllm_receives_the_location_of_its_blocks(tmp_path: Path) -> None:
    async def check() -> None:
        first, second = Other(), Other()
        async with decoding(tmp_path, prefill_0=first, prefill_1=second) as system:
            for session in "abcdefgh":
                before = len(first.asked), len(second.asked)
                for _ in range(2):
                    assert (await system.ask(session=session)).json() == {"ok": True}
                after = len(first.asked), len(second.asked)
                assert sorted(now - was for now, was in zip(after, before, strict=True)) == [0, 2]
            assert first.asked and second.asked
            assert system.seen == [BODY | {"kv_transfer_params": PARAMS}] * 16

    run_it(check)


def test_the_next_engine_is_tried_and_finally_none(tmp_path: Path) -> None:
    async def check() -> None:
        broken, whole = Other(status=500), Other()
        async with decoding(tmp_path, prefill_0=broken, prefill_1=whole) as system:
            for session in "abcd":
                await system.ask(session=session)
            assert broken.asked and len(whole.asked) == 4
            assert all(seen["kv_transfer_params"] == PARAMS for seen in system.seen)
            whole.status = 500
            assert (await system.ask()).status_code == 200
            assert system.seen[-1] == BODY

    run_it(check)


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_rejected_request_is_answered_by_the_local_vllm(tmp_path: Path, status: int) -> None:
    async def check() -> None:
        first, second = Other(status=status), Other(status=status)
        async with decoding(tmp_path, prefill_0=first, prefill_1=second) as system:
            await system.ask()
            assert len(first.asked) + len(second.asked) == 1 and system.seen == [BODY]

    run_it(check)


def test_blocks_of_another_policy_version_are_released(tmp_path: Path) -> None:
    async def check() -> None:
        async with decoding(tmp_path, prefill_0=Other(version=2)) as system:
            await system.ask()
            assert system.seen == [BODY] and system.given_back == [PARAMS]

    run_it(check)


@pytest.mark.parametrize("how", ["ended", "to be restarted"])
def test_a_hanging_engine_is_awaited_until_it_is_unpublished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(prefill, "POLL_S", 0.05)

    async def check() -> None:
        async with hanging(tmp_path) as (system, _, asked):
            assert not system.seen
            if how == "ended":
                system.run.endpoint("prefill-0").unlink()
            else:
                request = system.run.restart_request("prefill-0")
                request.parent.mkdir(parents=True, exist_ok=True)
                write_json(request, {})
            assert (await asked).status_code == 200
            assert system.seen == [BODY]

    run_it(check)


def test_a_restarted_engine_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "POLL_S", 0.0)

    async def check() -> None:
        async with decoding(tmp_path, prefill_0=Other(), prefill_1=Other()) as system:
            ends = {name: read_endpoint(system.run, name) for name in ("prefill-0", "prefill-1")}
            for name in ends:
                system.run.endpoint(name).unlink()
            await system.ask()
            assert system.seen[-1] == BODY
            publish_endpoint(system.run, "prefill-0", ends["prefill-1"]["url"])  # on another port
            await system.ask()
            assert system.seen[-1]["kv_transfer_params"] == PARAMS
            assert len(system.others["prefill_1"].asked) == 1 and not system.others["prefill_0"].asked

    run_it(check)


def test_a_disconnected_client_cancels_its_prefill(tmp_path: Path) -> None:
    async def check() -> None:
        async with hanging(tmp_path) as (system, other, asked):
            asked.cancel()
            await other.left.wait()
            assert not system.seen

    run_it(check)


def test_every_request_to_a_prefill_engine_has_the_key(tmp_path: Path) -> None:
    async def check() -> None:
        other = Other()
        async with decoding(tmp_path, prefill_0=other) as system:
            answer = await system.client.post(f"{system.url}{GENERATE}", json=BODY)
            assert answer.status_code == 401 and not other.asked and not system.seen

    run_it(check)
