"""The router: ``python -m primerl_hpc.roles.router RUN_DIR PHASE router-0``.

Clients send requests here, and the router forwards each to one engine (`inference.balancing` decides which). It serves
TLS with a certificate of the attempt, every route requires the API key, and it connects only to engines that are
published in the run directory and have a certificate of the attempt's certificate authority (docs/security.md). Only
inference routes are forwarded: admin requests are sent to the engines directly.

    GET /primerl/engines     → {"engines": ["https://…", …]}, the engines that receive requests now
    GET /health              → 200
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestPayloadError
from multidict import CIMultiDict

from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.log import MalformedRequests
from primerl_hpc.common.names import Role
from primerl_hpc.common.waiting import TransientIOErrors
from primerl_hpc.inference.balancing import Balancer
from primerl_hpc.roles.start import RoleProcess, start_role
from primerl_hpc.run.access.admission import Admission
from primerl_hpc.run.access.keys import RunKeys, is_bearer, run_keys
from primerl_hpc.run.endpoints import PublishedEngines, publish_endpoint
from primerl_hpc.run.ports import bind_listener, listen_host
from primerl_hpc.run.rundir import RunDir

POLL_S = 0.25
FIND_EVERY_S = 1.0
"""Interval between looks for engines that requests cause. Otherwise looks are seconds apart if nothing changes."""
HEALTH_EVERY_S, HEALTH_TIMEOUT_S, HEALTH_FAILURES = 5.0, 20.0, 2
"""An engine that fails this many checks in a row gets no new requests until it responds. The supervisor ends an engine
that hangs."""
STATE_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
MAX_TRIES = 3
"""Number of engines to try if a connection breaks before the first byte of the response."""
FAILURES, COOLING_S = 16, 5.0
"""An engine that responds to this many requests in a row with 5xx is skipped for a while if there are others."""
MAX_BODY_BYTES = 1 << 30
FORWARDED = ("/v1/{path:.*}", "/inference/v1/{path:.*}", "/tokenize", "/detokenize")
"""Patterns of aiohttp for the paths of inference routes."""
_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length")
)
SESSION_HEADER = "X-Session-ID"


def main(argv: list[str]) -> int:
    return start_role("router", argv, serve)


def serve(role: RoleProcess) -> None:
    """Serve until SIGTERM."""
    malformed = MalformedRequests(errors=(HttpProcessingError, RequestPayloadError))
    logging.getLogger("aiohttp.server").addFilter(malformed)
    uvloop.run(_serve(role))


async def _serve(role: RoleProcess) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    recipe = role.recipe
    host = listen_host(role.plan.num_hosts)
    # by default the load of engines may differ by one group, whose rollouts share a prompt
    balancer = Balancer(recipe.layout.inference.routing, slack=recipe.rollouts.group_size)
    admission = Admission(expected=role.phase.max_connections)
    with contextlib.closing(bind_listener(host, role.run.last_port(role.process))) as listener:
        async with Router(role.run, run_keys(role.run), balancer, admission).listening(
            role.process, listener
        ) as router:
            url = f"https://{host}:{listener.getsockname()[1]}"
            publish_endpoint(role.run, role.process, url, model=recipe.policy_name)
            role.logger.info("Router listens at %s", url)
            keeper = Keeper(router, role.logger)
            tasks = [asyncio.create_task(keeper.keep()), asyncio.create_task(keeper.watch_health())]
            stopped = asyncio.create_task(stop.wait())
            done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in (*tasks, stopped):
                task.cancel()
            for task in done:
                task.result()


@dataclass
class Router:
    """Forwards requests to ``engines``."""

    run: RunDir
    keys: RunKeys
    balancer: Balancer
    admission: Admission
    engines: list[str] = field(default_factory=list)
    """Engines that may receive requests; see `change_engines`."""
    find_engines: Callable[[], Awaitable[None]] | None = None
    """Called by a request if there is no engine: one may have been published since the last look."""
    suspended: set[str] = field(default_factory=set)
    """Engines that failed their health checks."""
    _failures: Counter[str] = field(default_factory=Counter)
    _cooling: set[str] = field(default_factory=set)
    _calls: dict[str, set[asyncio.Timeout]] = field(default_factory=dict)
    """Requests in flight by engine; all are aborted when the engine leaves, since a lost node closes no connection."""

    @contextlib.asynccontextmanager
    async def listening(self, process: str, listener: socket.socket) -> AsyncIterator[Router]:
        """Serve on the bound ``listener`` while the context lasts."""
        host = listener.getsockname()[0]
        self.client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self.keys.client_context()),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            headers={"Authorization": f"Bearer {self.keys.api_key}"},
            auto_decompress=False,
            trust_env=False,
        )
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self.require_key])
        app.router.add_get("/health", self.health)
        app.router.add_get("/primerl/engines", self.list_engines)
        for pattern in FORWARDED:
            app.router.add_route("*", pattern, self.forward)
        app.router.add_route("*", "/{path:.*}", self.refuse)
        # bodies are forwarded as they are
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, auto_decompress=False)
        await runner.setup()
        try:
            assert runner.server is not None  # `setup` creates it
            tls = self.keys.server_context(process, host)
            gate = await self.admission.serve(runner.server, listener, tls)
            try:
                yield self
            finally:
                gate.close()
        finally:
            await self.client.close()
            await runner.cleanup()

    # -- requests ----------------------------------------------------------------------------------
    @web.middleware
    async def require_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Respond with 401 to every request, to any path, without the API key."""
        if is_bearer(request.headers.get("Authorization", ""), self.keys.api_key):
            if request.transport is not None:
                self.admission.admit(request.transport.get_extra_info("peername"))
            return await handler(request)
        response = _error(401, "missing or wrong API key")
        response.force_close()
        return response

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def list_engines(self, _: web.Request) -> web.Response:
        return web.json_response({"engines": sorted(self.engines)})

    async def refuse(self, request: web.Request) -> web.Response:
        return _error(404, f"the router does not serve {request.path}")

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Forward the request to an engine, and to another one if the first fails before its response begins."""
        if ".." in request.path.split("/"):
            return await self.refuse(request)  # a client would resolve it, to a route that is not forwarded
        body = await request.read()
        session = request.headers.get(SESSION_HEADER)
        if not self.engines and self.find_engines is not None:
            await self.find_engines()
        tried: set[str] = set()
        fault = "no engine is ready"
        while len(tried) < MAX_TRIES:
            engine = self.balancer.choose(self.ready(tried), session=session, body=body)
            if engine is None:
                break
            tried.add(engine)
            self.balancer.begin(engine)
            call = asyncio.timeout(None)
            calls = self._calls.setdefault(engine, set())
            try:
                async with call:
                    calls.add(call)
                    return await self._ask(engine, request, body)
            except (_NotStarted, TimeoutError) as error:
                fault = str(error) or f"{engine} left the run"
                self._note(engine, is_failure=True, is_broken=True)
            finally:
                calls.discard(call)
                self.balancer.end(engine)
        return _error(503, fault)

    def change_engines(self, engines: list[str]) -> None:
        """Replace the list of engines; requests in flight at an engine that leaves are sent to another one."""
        for engine in set(self.engines) - set(engines):
            for call in self._calls.pop(engine, ()):
                call.reschedule(0.0)
        self.engines = engines

    def ready(self, without: set[str]) -> list[str]:
        """Return the engines to choose from: healthy ones, else all that the run publishes."""
        remaining = [engine for engine in self.engines if engine not in without]
        return [engine for engine in remaining if engine not in self.suspended | self._cooling] or remaining

    async def _ask(self, engine: str, request: web.Request, body: bytes) -> web.StreamResponse:
        """Forward the request and stream the response. Raises _NotStarted if another engine can still be tried."""
        headers = CIMultiDict(
            (name, value) for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP
        )
        try:
            answer = await self.client.request(
                request.method, f"{engine}{request.path_qs}", data=body or None, headers=headers
            )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _NotStarted(f"{engine}: {type(error).__name__}: {error}") from error
        async with answer:
            self._note(engine, is_failure=answer.status >= 500)
            passed = CIMultiDict(
                (name, value) for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP
            )
            if answer.content_length is not None:
                try:
                    content = await answer.read()
                except aiohttp.ClientError as error:
                    raise _NotStarted(f"{engine}: {type(error).__name__}: {error}") from error
                return web.Response(status=answer.status, headers=passed, body=content)
            response = web.StreamResponse(status=answer.status, headers=passed)
            await response.prepare(request)
            try:
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
            except (aiohttp.ClientError, asyncio.CancelledError):
                # part of the response was sent: closing the connection is the only way to report the error
                if request.transport is not None:
                    request.transport.close()
                raise
            await response.write_eof()
            return response

    def _note(self, engine: str, *, is_failure: bool, is_broken: bool = False) -> None:
        """Skip an engine that responds only with errors, for `COOLING_S`."""
        if not is_failure:
            self._failures.pop(engine, None)
            return
        self._failures[engine] += 1
        if (is_broken or self._failures[engine] >= FAILURES) and engine not in self._cooling:
            self._cooling.add(engine)
            asyncio.get_running_loop().call_later(COOLING_S, self._cooling.discard, engine)


class _NotStarted(Exception):
    """Nothing of the engine's response has reached the client."""


def _error(status: int, cause: str) -> web.Response:
    return web.json_response({"error": cause}, status=status)


class Keeper:
    """Keeps the router's engines in sync with those that are published and serve the live policy version."""

    def __init__(self, router: Router, logger: Any) -> None:
        self.router, self.run, self.logger = router, router.run, logger
        self.published = PublishedEngines(router.run, Role.INFERENCE.value)
        self.patience = TransientIOErrors("the published engines")
        self._lock = asyncio.Lock()
        self._looked_at = -math.inf
        router.find_engines = self.find_engines

    async def keep(self) -> None:
        while True:
            await self.reconcile()
            await asyncio.sleep(POLL_S)

    async def find_engines(self) -> None:
        """Read the endpoints now, at most once in `FIND_EVERY_S` for all requests that wait for it."""
        async with self._lock:
            if time.monotonic() - self._looked_at >= FIND_EVERY_S:
                self._looked_at = time.monotonic()
                self.published.hurry()
                await self._reconcile()

    async def reconcile(self) -> None:
        """Read the endpoints once and apply the changes.

        An engine joins when it serves the live version, and leaves when it is no longer published; a slow engine stays.
        """
        async with self._lock:
            await self._reconcile()

    async def _reconcile(self) -> None:
        with self.patience:
            published = list((await asyncio.to_thread(self.published.urls)).values())
            new = [url for url in published if url not in self.router.engines]
            live = await asyncio.to_thread(read_json_or_none, self.run.live_version) if new else None
            joins = await asyncio.gather(*(self.may_serve(url, live) for url in new))
            joined = [url for url, is_joining in zip(new, joins, strict=True) if is_joining]
            kept = [url for url in self.router.engines if url in published]
            for change, urls in (("Added", joined), ("Removed", set(self.router.engines) - set(kept))):
                for url in sorted(urls):
                    self.logger.info("%s engine %s", change, url)
            self.router.change_engines(kept + joined)

    async def may_serve(self, url: str, live: dict[str, Any] | None) -> bool:
        """True if the engine serves the live policy version: an outdated one is updated before its first request."""
        try:
            state = await self._get_json(f"{url}/primerl/state", STATE_TIMEOUT_S)
            return live is None or state["version"] == live["version"]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
            return False

    async def watch_health(self) -> None:
        failures: Counter[str] = Counter()
        while True:
            await asyncio.gather(*(self._check_health(url, failures) for url in self.router.engines))
            self.router.suspended = {url for url, count in failures.items() if count >= HEALTH_FAILURES}
            await asyncio.sleep(HEALTH_EVERY_S)

    async def _check_health(self, url: str, failures: Counter[str]) -> None:
        try:
            timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
            async with self.router.client.get(f"{url}/health", timeout=timeout) as answer:
                is_healthy = answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            is_healthy = False
        failures[url] = 0 if is_healthy else failures[url] + 1

    async def _get_json(self, url: str, timeout_s: float) -> Any:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self.router.client.get(url, timeout=timeout, raise_for_status=True) as answer:
            return await answer.json(content_type=None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
