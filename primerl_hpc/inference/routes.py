"""The engine's own routes and its lock, as one ASGI middleware (vLLM's ``--middleware``).

    POST /pause           {"clear_cache": false}          → {"paused": true}      in-flight requests freeze, new ones queue
    POST /update_weights  {"path": "…", "version": 3}     → {"version": 3}       or a chain, see `transport.weights`
    POST /resume                                          → {"paused": false}
    POST /reload_weights                                  → {"version": 0}       back to the weights that version 0 is
    GET  /primerl/state                                   → {"process", "attempt", "incarnation", "version", "paused"}

Every answer, theirs too, has the policy version that was live when it began in its header ``x-primerl-policy-version``.

Every route of the server, vLLM's included, needs ``Authorization: Bearer <key of the run>``, except /health and
/metrics, which the router and monitors ask. (vLLM's own ``--api-key`` leaves most routes open.)
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from dataclasses import dataclass, field
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from primerl_hpc.common.errors import DataError, RoleError
from primerl_hpc.common.rundir import VERSION_HEADER, RunDir
from primerl_hpc.inference.checkpoint import TensorInfo, check_same_model, read_headers
from primerl_hpc.inference.routed_experts import GENERATE, rewording
from primerl_hpc.transport.weights import describe, from_body

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/metrics"})


@dataclass
class EngineState:
    """What one engine process knows about itself. One per process: vLLM makes the middleware from its import path."""

    process: str
    attempt: int
    incarnation: int
    version: int
    """Policy version that the model's weights are of; -1: an adapter is to come, and none is loaded yet."""
    api_key: str
    base_path: str = ""
    """Folder or hub id of the model that version 0 is."""
    adapter: str | None = None
    """Name under which adapters are served, where policy versions are these alone."""
    adapter_tensors: dict[str, TensorInfo] | None = None
    """Of the adapter that is loaded."""
    returns_experts: bool = False
    """Whether replies say which experts were chosen."""
    prefill_run: RunDir | None = None
    """Where engines are published that prefill for this one; None: it does so itself."""
    paused: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    fault: asyncio.Future[None] | None = None
    """Gets the exception after which this engine must not serve any more (see `server.companion`)."""

    def public(self) -> dict[str, Any]:
        names = ("process", "attempt", "incarnation", "version", "paused")
        return {name: getattr(self, name) for name in names}


_state: EngineState | None = None


def install(state: EngineState) -> None:
    """Say whom the routes of this process speak for; before the server is built."""
    global _state
    _state = state


class EngineRoutes:
    def __init__(self, app: ASGIApp) -> None:
        if _state is None:
            raise RoleError("the engine's routes were built before their state was installed")
        self.app, self.state = app, _state
        if _state.prefill_run is not None:
            from primerl_hpc.inference.prefill import RemotePrefill

            self.app = RemotePrefill(app, _state.prefill_run, _state)
        self.routes = {
            ("POST", "/pause"): self.pause,
            ("POST", "/resume"): self.resume,
            ("POST", "/update_weights"): self.update_weights,
            ("POST", "/reload_weights"): self.reload_weights,
            ("GET", "/primerl/state"): self.show_state,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = self._with_version(send)
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            request = Request(scope, receive)
            if not self._is_authorized(request):
                response = JSONResponse({"error": "missing or wrong API key"}, status_code=401)
                return await response(scope, receive, send)
            if (route := self.routes.get((scope["method"], scope["path"]))) is not None:
                response = await route(request)
                return await response(scope, receive, send)
            if self.state.returns_experts and scope["path"] == GENERATE:
                receive, send = await rewording(request, send)
        elif scope["type"] == "websocket":  # vLLM's realtime route: not part of a run
            return await send({"type": "websocket.close", "code": 1008})
        return await self.app(scope, receive, send)

    def _with_version(self, send: Send) -> Send:
        async def send_it(message: Message) -> None:
            if message["type"] == "http.response.start":
                version = (VERSION_HEADER.encode(), str(self.state.version).encode())
                message = {**message, "headers": [*message.get("headers", ()), version]}
            await send(message)

        return send_it

    def _is_authorized(self, request: Request) -> bool:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(key.encode(), self.state.api_key.encode())

    # -- routes ------------------------------------------------------------------------------------------------
    async def show_state(self, _: Request) -> JSONResponse:
        return JSONResponse(self.state.public())

    async def pause(self, request: Request) -> JSONResponse:
        """``clear_cache``: the KV of requests in flight is recomputed with the next weights instead of kept."""
        body = await _json(request)
        async with self.state.lock:
            await _engine(request).pause_generation(
                mode="keep", clear_cache=bool(body.get("clear_cache", False))
            )
            self.state.paused = True
        return JSONResponse({"paused": True})

    async def resume(self, request: Request) -> JSONResponse:
        async with self.state.lock:
            await _engine(request).resume_generation()
            self.state.paused = False
        return JSONResponse({"paused": False})

    async def update_weights(self, request: Request) -> JSONResponse:
        """Load a version in place on every rank: a model's weights, or an adapter.

        400: bad request; 422: bad folder, the old weights keep serving.
        """
        return await self._update(request, await _json(request))

    async def reload_weights(self, request: Request) -> JSONResponse:
        """Version 0 again. 409: versions are adapters here, and the base model is served beside them under its own name."""
        if self.state.adapter is not None:
            return _error(409, f"'{self.state.adapter}' is an adapter: ask for the model itself by its name")
        return await self._update(request, {"path": self.state.base_path, "version": 0})

    async def _update(self, request: Request, body: dict[str, Any]) -> JSONResponse:
        try:
            source, version = from_body(body)
        except ValueError as error:
            return _error(400, str(error))
        async with self.state.lock:
            load = self._load_model if self.state.adapter is None else self._load_adapter
            if (refusal := await load(request, body)) is not None:
                return refusal
            self.state.version = version
            # requests without a cache salt must not meet prefixes of the old weights; kept while requests hold them
            await _engine(request).reset_prefix_cache()
        logger.info("serving policy version %d from %s", version, describe(source, version))
        return JSONResponse({"version": version})

    async def _load_model(self, request: Request, body: dict[str, Any]) -> JSONResponse | None:
        path = body["path"]
        try:
            ranks = await _engine(request).collective_rpc("primerl_update_weights", args=(body,))
        except Exception as error:  # noqa: BLE001 (whatever a worker raised: its model is incomplete now)
            return self._fail(f"loading {path} failed half-way: {type(error).__name__}: {error}")
        if refused := [rank["error"] for rank in ranks if "error" in rank]:
            if len(refused) < len(ranks):
                return self._fail(f"ranks disagree about {path}: {refused[0]}")
            return _error(422, refused[0])
        return None

    async def _load_adapter(self, request: Request, body: dict[str, Any]) -> JSONResponse | None:
        from primerl_hpc.inference import vllm_compat

        assert self.state.adapter is not None
        path = body["path"]
        try:
            tensors = read_headers(Path(path))
            if self.state.adapter_tensors is not None:
                check_same_model(tensors, self.state.adapter_tensors, is_tied=False, place=path)
        except (DataError, OSError) as error:
            return _error(422, str(error))
        try:
            await vllm_compat.load_adapter(request.app.state, self.state.adapter, path)
        except Exception as error:  # noqa: BLE001 (whatever a worker raised: it reads before it replaces)
            return _error(422, f"{path} is not taken: {type(error).__name__}: {error}")
        self.state.adapter_tensors = tensors
        return None

    def _fail(self, cause: str) -> JSONResponse:
        if self.state.fault is not None and not self.state.fault.done():
            self.state.fault.set_exception(RoleError(cause))
        return _error(500, cause)


def _engine(request: Request) -> Any:
    return request.app.state.engine_client


def _error(status: int, cause: str) -> JSONResponse:
    return JSONResponse({"error": cause}, status_code=status)


async def _json(request: Request) -> dict[str, Any]:
    """The body as an object; an empty or malformed one counts as {}."""
    try:
        body = await request.json()
    except (JSONDecodeError, UnicodeDecodeError):
        return {}
    return body if isinstance(body, dict) else {}
