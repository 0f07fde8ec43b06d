"""Admin routes of engines and the fleet: real middleware and client; only the engine of vLLM is simulated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from primerl_hpc.common.errors import RoleError, TimeoutWaitingError
from primerl_hpc.common.files import read_json
from primerl_hpc.inference import routes
from primerl_hpc.orchestrator.engines.fleet import Fleet, FleetOptions, parse_metrics
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import PATIENCE_S, wait_for_async
from tests.unit.inference.test_prefill import listening


class PlayedEngine:
    """vLLM's engine client as the routes use it; ``bad`` folders are refused by every rank."""

    def __init__(self, ranks: int = 2) -> None:
        self.ranks, self.calls = ranks, []
        self.bad: dict[str, Any] = {}

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(("pause", mode, clear_cache))

    async def resume_generation(self) -> None:
        self.calls.append(("resume",))

    async def sleep(self, *, level: int, mode: str) -> None:
        self.calls.append(("sleep", level, mode))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(("wake_up", tags))

    async def reset_prefix_cache(self) -> bool:
        return True

    async def reset_encoder_cache(self) -> None: ...

    async def collective_rpc(self, method: str, args: tuple[dict[str, Any]]) -> list[dict[str, Any]]:
        path, version = args[0]["path"], args[0]["version"]
        self.calls.append((method, path, version))
        fault = self.bad.get(path)
        if isinstance(fault, Exception) and method == "primerl_update_weights":
            raise fault
        if isinstance(fault, str) and method == "primerl_prepare_update":
            num_refusing = self.ranks if fault == "refuse" else 1
            return [
                {"rank": rank, "error": f"{path}: bad"}
                if rank < num_refusing
                else {"rank": rank, "version": version}
                for rank in range(self.ranks)
            ]
        return [{"rank": rank, "version": version} for rank in range(self.ranks)]


class Served:
    """One played engine behind the real routes, on a real port, published in the run."""

    def __init__(self, run: RunDir, process: str, version: int = 0) -> None:
        self.run, self.process, self.engine = run, process, PlayedEngine()
        self.state = routes.EngineState(process, 1, 0, version, api_key=run_keys(run).api_key)
        self.metrics = "ok"

    async def start(self) -> None:
        routes.install(self.state)
        self.state.fault = asyncio.get_running_loop().create_future()
        ok = [Route(path, lambda _: PlainTextResponse("ok")) for path in ("/health", "/v1/models")]
        app = Starlette(routes=[*ok, Route("/metrics", lambda _: PlainTextResponse(self.metrics))])
        app.state.engine_client = self.engine
        app.add_middleware(routes.EngineRoutes)
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
        self.server = uvicorn.Server(config)
        self.task = asyncio.create_task(self.server.serve())
        await wait_for_async(lambda: self.server.started, "uvicorn")
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient() as client:  # the first request builds the middleware, from this state
            await client.get(f"{self.url}/health")
        publish_endpoint(self.run, self.process, self.url)

    async def stop(self) -> None:
        self.server.should_exit = True
        await self.task


@asynccontextmanager
async def serving(
    tmp_path: Path, *names: str, **options: Any
) -> AsyncIterator[tuple[RunDir, Fleet, list[Served]]]:
    run = RunDir(tmp_path)
    engines = [Served(run, name) for name in names]
    for engine in engines:
        await engine.start()
    fleet = Fleet(run, run_keys(run), FleetOptions(backoff_s=0.001, **options))
    try:
        yield run, fleet, engines
    finally:
        await fleet.close()
        for engine in engines:
            await engine.stop()


def test_an_update_pauses_loads_and_resumes_every_engine(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path, "inference-0", "inference-1", recompute_kv=True) as (_, fleet, engines):
            report = await fleet.update("/w/step_3", 3)
            assert (report.updated, report.failed) == (("inference-0", "inference-1"), {})
            for engine in engines:
                loads = [(f"primerl_{name}", "/w/step_3", 3) for name in ("prepare_update", "update_weights")]
                assert engine.engine.calls == [("pause", "keep", True), *loads, ("resume",)]
            assert await fleet.versions() == {"inference-0": 3, "inference-1": 3}

    asyncio.run(check())


def test_an_engine_that_prefills_is_updated_with_the_others_and_is_no_part_of_their_load(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        async with serving(tmp_path, "inference-0", "prefill-0") as (run, fleet, engines):
            for engine in engines:
                engine.metrics = "vllm:num_requests_running 2\n"
            report = await fleet.update("/w/step_3", 3)
            assert report.updated == ("inference-0", "prefill-0") and report.is_served
            assert await fleet.versions() == {"inference-0": 3, "prefill-0": 3}
            assert await fleet.metrics() == {"inference-0": {"running": 2.0}}
            run.endpoint("inference-0").unlink()
            report = await fleet.reconcile("/w/step_4", 4)
            assert (
                report.updated == ("prefill-0",) and not report.is_served
            )  # no engine would answer a request

    asyncio.run(check())


def test_a_folder_that_all_engines_refuse_restarts_none_and_leaves_none_paused(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path, "inference-0", "inference-1") as (run, fleet, engines):
            for engine in engines:
                engine.engine.bad["/w/bad"] = "refuse"
            report = await fleet.update("/w/bad", 1)
            assert set(report.failed) == {"inference-0", "inference-1"}
            assert "/w/bad: bad" in report.failed["inference-0"]
            assert await fleet.versions() == {"inference-0": 0, "inference-1": 0}
            assert not any(engine.state.paused for engine in engines)
            assert not any(run.restart_request(engine.process).exists() for engine in engines)

    asyncio.run(check())


def test_an_engine_that_alone_refuses_is_restarted_after_its_retries(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path, "inference-0", "inference-1", attempts=3) as (run, fleet, engines):
            engines[1].engine.bad["/w/step_1"] = "refuse"
            report = await fleet.update("/w/step_1", 1)
            assert report.updated == ("inference-0",)
            assert set(report.failed) == {"inference-1"}
            request = read_json(run.restart_request("inference-1"))
            assert "bad" in request["reason"]
            assert not run.restart_request("inference-0").exists()
            assert len([call for call in engines[1].engine.calls if call == ("resume",)]) == 3

    asyncio.run(check())


def test_a_version_that_one_worker_cannot_load_is_loaded_by_no_worker(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path, "inference-0", attempts=1) as (run, fleet, engines):
            engines[0].engine.bad["/w/step_1"] = "some workers refuse"
            report = await fleet.update("/w/step_1", 1)
            assert (
                "1 of 2 workers cannot load /w/step_1; worker 0: /w/step_1: bad"
                in report.failed["inference-0"]
            )
            methods = [call[0] for call in engines[0].engine.calls]
            assert methods == ["pause", "primerl_prepare_update", "primerl_discard_update", "resume"]
            assert await fleet.versions() == {"inference-0": 0}
            assert not engines[0].state.fault.done() and not run.restart_request("inference-0").exists()

    asyncio.run(check())


def test_an_engine_whose_model_is_incomplete_reports_it_and_must_exit(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path, "inference-0", attempts=1) as (run, fleet, engines):
            engines[0].engine.bad["/w/step_1"] = RuntimeError("meta tensor")
            report = await fleet.update("/w/step_1", 1)
            assert "inference-0" in report.failed
            assert run.restart_request("inference-0").exists()
            with pytest.raises(RoleError):
                await asyncio.wait_for(engines[0].state.fault, PATIENCE_S)

    asyncio.run(check())


def test_an_engine_that_does_not_respond_fails_and_the_others_continue(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path, "inference-0", attempts=2) as (run, fleet, _):
            publish_endpoint(run, "inference-1", "http://127.0.0.1:1")
            report = await fleet.update("/w/step_1", 1)
            assert report.updated == ("inference-0",)
            assert set(report.failed) == {"inference-1"}
            assert run.restart_request("inference-1").exists()
            assert await fleet.versions() == {"inference-0": 1, "inference-1": None}

    asyncio.run(check())


def test_an_engine_that_dies_during_the_update_is_not_asked_to_restart(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path, "inference-0", attempts=2) as (run, fleet, engines):
            engines[0].engine.bad["/w/step_1"] = "refuse"
            collective_rpc = engines[0].engine.collective_rpc

            async def dies(*args: Any, **kwargs: Any) -> Any:
                run.endpoint("inference-0").unlink(missing_ok=True)
                return await collective_rpc(*args, **kwargs)

            engines[0].engine.collective_rpc = dies
            report = await fleet.update("/w/step_1", 1)
            assert "died" in report.failed["inference-0"]
            assert not run.restart_request("inference-0").exists()

    asyncio.run(check())


def test_an_engine_whose_node_is_lost_holds_an_update_up_no_longer_than_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("primerl_hpc.orchestrator.engines.admin_client.PUBLISHED_POLL_S", 0.05)

    async def check() -> None:
        async with serving(tmp_path, "inference-0", "inference-1", attempts=1) as (run, fleet, engines):
            loads, is_back = asyncio.Event(), asyncio.Event()
            collective_rpc = engines[1].engine.collective_rpc

            async def hangs(*args: Any, **kwargs: Any) -> Any:
                loads.set()
                await is_back.wait()
                return await collective_rpc(*args, **kwargs)

            engines[1].engine.collective_rpc = hangs
            update = asyncio.create_task(fleet.update("/w/step_1", 1))
            await loads.wait()
            run.endpoint("inference-1").unlink()
            try:
                report = await asyncio.wait_for(update, PATIENCE_S)
            finally:
                is_back.set()
            assert report.updated == ("inference-0",)
            assert "endpoint was removed" in report.failed["inference-1"]
            assert not run.restart_request("inference-1").exists()

    asyncio.run(check())


def test_more_engines_than_a_hundred_are_asked_at_the_same_time(tmp_path: Path) -> None:
    run, num_engines = RunDir(tmp_path), 120
    there: list[Request] = []
    all_there = asyncio.Event()

    async def pause(request: Request) -> JSONResponse:
        there.append(request)
        if len(there) == num_engines:
            all_there.set()
        await all_there.wait()
        return JSONResponse({"paused": True})

    async def check() -> None:
        async with listening(Starlette(routes=[Route("/pause", pause, methods=["POST"])])) as url:
            for index in range(num_engines):
                publish_endpoint(run, f"inference-{index}", url)
            fleet = Fleet(run, run_keys(run))
            asked = fleet.client.pause_all([*fleet.policy().values()])
            try:
                assert await asyncio.wait_for(asked, PATIENCE_S) == [None] * num_engines
            finally:
                all_there.set()
                await fleet.close()

    asyncio.run(check())


def test_reconcile_updates_only_engines_that_are_behind_or_paused(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path, "inference-0", "inference-1", "inference-2") as (_, fleet, engines):
            engines[0].state.version = 4
            engines[1].state.version = 2
            engines[2].state.version, engines[2].state.paused = 4, True
            report = await fleet.reconcile("/w/step_4", 4)
            assert report.updated == ("inference-0", "inference-1", "inference-2")
            assert engines[0].engine.calls == []
            assert engines[1].engine.calls[-1] == engines[2].engine.calls[-1] == ("resume",)
            assert set((await fleet.versions()).values()) == {4}

    asyncio.run(check())


def test_waiting_for_missing_engines_reports_how_many_are_ready(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path, "inference-0") as (_, fleet, _engines):
            assert await fleet.wait_ready(1, timeout_s=PATIENCE_S) == {"inference-0": 0}
            with pytest.raises(TimeoutWaitingError, match="1 of 2 engines"):
                await fleet.wait_ready(2, timeout_s=0.05, poll_s=0.01)

    asyncio.run(check())


def test_every_route_needs_the_key(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path, "inference-0") as (_, _fleet, engines), httpx.AsyncClient() as client:
            url = engines[0].url
            key = engines[0].state.api_key
            for wrong in ({}, {"Authorization": "Bearer x"}, {"Authorization": key}):
                for method, path in [
                    *(
                        ("GET", path)
                        for path in ("/v1/models", "/primerl/state", "/health", "/metrics", "/x")
                    ),
                    *(("POST", path) for path in ("/pause", "/resume", "/update_weights")),
                ]:
                    answer = await client.request(method, url + path, headers=wrong)
                    assert answer.status_code == 401, path
            right = {"Authorization": f"Bearer {key}"}
            assert (await client.get(url + "/v1/models", headers=right)).status_code == 200
            assert engines[0].engine.calls == []

    asyncio.run(check())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"path": 1}',
        b'{"path": "/w", "version": -1}',
        b'{"path": "/w", "version": 3, "base": 1}',
        b'{"path": "/w", "version": 3, "base": 1, "links": [[2]]}',
    ],
)
def test_a_malformed_update_is_refused(tmp_path: Path, body: bytes) -> None:
    async def check() -> None:
        async with serving(tmp_path, "inference-0") as (_, _fleet, engines), httpx.AsyncClient() as client:
            headers = run_keys(engines[0].run).headers
            answer = await client.post(f"{engines[0].url}/update_weights", content=body, headers=headers)
            assert answer.status_code == 400
            assert engines[0].engine.calls == []

    asyncio.run(check())


def test_metrics_are_summed_over_ranks_and_shares_are_not() -> None:
    text = (
        "# HELP vllm:num_requests_running …\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 4.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.5\n'
        "vllm:generation_tokens_total 1e3\nvllm:generation_tokens_created 1.7e9\n"
        'primerl_prefill_total{by="other"} 5.0\nprimerl_prefill_total{by="self"} 2.0\n'
    )
    assert parse_metrics(text) == {
        "running": 7.0,
        "kv_usage": 0.5,
        "generation_tokens": 1000.0,
        "prefill_other": 5.0,
        "prefill_self": 2.0,
    }
