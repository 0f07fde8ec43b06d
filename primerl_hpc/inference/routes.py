"""The engine's additional routes and its authentication, as one ASGI middleware (vLLM's ``--middleware``).

    POST /pause           {"clear_cache": false}        → {"paused": true}     freeze requests in flight, queue new ones
    POST /update_weights  {"path": "…", "version": 3}   → {"version": 3}       other bodies: `transport.weights.sources`
    POST /resume                                        → {"paused": false}
    POST /reload_weights                                → {"version": 0}       load version 0 again
    POST /load_lora_adapter    {"lora_name": "a", "lora_path": "…"}   → {"adapters": ["a"]}   serve it, or replace it
    POST /unload_lora_adapter  {"lora_name": "a"}                     → {"adapters": []}
    POST /sleep                                         → {"asleep": true}     freeze requests, free the accelerators
    POST /wake_up                                       → {"asleep": false}    with the weights that it slept with
    GET  /primerl/state              → {"process", "attempt", "incarnation", "version", "paused", "asleep"}

A sleeping engine keeps its requests and queues new ones. ``/update_weights`` wakes it with the new weights;
``/resume`` has no effect until then.

Every response of the server, vLLM's routes included, has the header ``x-primerl-policy-version``: the policy version
that was live when the response began.

Every route, vLLM's included, requires ``Authorization: Bearer <API key of the attempt>``; vLLM's own ``--api-key``
leaves most routes open. Requests that contain a chat template are rejected (`chat_requests`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from primerl_hpc.common.errors import DataError, RoleError
from primerl_hpc.common.model_files import TensorInfo
from primerl_hpc.inference.chat_requests import read_body, refused_template
from primerl_hpc.inference.checkpoint import check_same_model, read_headers
from primerl_hpc.inference.token_responses import GENERATE, rewrite_response
from primerl_hpc.inference.token_route import TokenRoute
from primerl_hpc.run.access.admission import Admission
from primerl_hpc.run.access.keys import is_bearer
from primerl_hpc.run.rundir import VERSION_HEADER, RunDir
from primerl_hpc.transport.weights.filesystem import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from primerl_hpc.transport.weights.sources import DeltaChain, RankAssignment, describe, from_body

VLLM_ADAPTER_ROUTES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""vLLM's own routes, which it has if VLLM_ALLOW_RUNTIME_LORA_UPDATING is set."""

logger = logging.getLogger(__name__)


@dataclass
class EngineState:
    """State of one engine process. There is one per process, because vLLM constructs the middleware by import path."""

    process: str
    attempt: int
    incarnation: int
    version: int
    """Policy version of the loaded weights; -1: the engine serves adapters and none is loaded yet."""
    api_key: str
    admission: Admission | None = None
    """Limits of connections without the key; None where no socket is served."""
    base_path: str = ""
    """Folder or hub id of the model that is version 0."""
    weight_roots: tuple[Path, ...] | None = None
    """Folders that contain policy versions. Weights from other folders than these and ``base_path`` are rejected.
    None: any folder is accepted."""
    adapter: str | None = None
    """Name under which adapters are served, if policy versions are adapters."""
    adapter_roots: tuple[Path, ...] = ()
    """Folders from which ``/load_lora_adapter`` loads adapters."""
    max_adapters: int = 0
    """Number of adapters that it serves in addition to the policy."""
    adapter_tensors: dict[str, TensorInfo] | None = None
    """Tensors of the loaded adapter."""
    template_settings: frozenset[str] = frozenset()
    """Names that a request's ``chat_template_kwargs`` may set."""
    returns_experts: bool = False
    """True if responses contain the selected experts."""
    numbers_tokens: bool = False
    """True if responses name the token of a log-probability by its number, as vLLM does from 0.32 on."""
    prefill_run: RunDir | None = None
    """Run directory in which prefill engines are published; None: this engine prefills locally."""
    sleep_level: int = 1
    """vLLM's level of sleep: 2 drops the weights, and only ``/update_weights`` wakes the engine."""
    paused: bool = False
    asleep: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    fault: asyncio.Future[None] | None = None
    """Receives the exception that ends this engine (see `server.wait_for_stop`)."""

    def public(self) -> dict[str, Any]:
        """Return the fields that ``GET /primerl/state`` shows."""
        names = ("process", "attempt", "incarnation", "version", "paused", "asleep")
        return {name: getattr(self, name) for name in names}


_state: EngineState | None = None


def install(state: EngineState) -> None:
    """Set the engine state used by the routes. Call before building the server."""
    global _state
    _state = state


class EngineRoutes:
    def __init__(self, app: ASGIApp) -> None:
        if _state is None:
            raise RoleError("EngineRoutes was constructed before routes.install() was called")
        # selected experts have no form as arrays
        self.app, self.state = app if _state.returns_experts else TokenRoute(app), _state
        if _state.prefill_run is not None:
            from primerl_hpc.inference.prefill import RemotePrefill

            self.app = RemotePrefill(self.app, _state.prefill_run, _state)
        self.routes = {
            ("POST", "/pause"): self.pause,
            ("POST", "/resume"): self.resume,
            ("POST", "/update_weights"): self.update_weights,
            ("POST", "/reload_weights"): self.reload_weights,
            ("POST", "/load_lora_adapter"): self.load_lora_adapter,
            ("POST", "/unload_lora_adapter"): self.unload_lora_adapter,
            ("POST", "/sleep"): self.sleep,
            ("POST", "/wake_up"): self.wake_up,
            ("GET", "/primerl/state"): self.show_state,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = self._with_version(send)
            request = Request(scope, receive)
            if not is_bearer(request.headers.get("authorization", ""), self.state.api_key):
                response = _error(401, "missing or wrong API key")
                response.headers["connection"] = "close"
                return await response(scope, receive, send)
            if self.state.admission is not None:
                self.state.admission.admit(scope["client"])
            if scope["path"] in VLLM_ADAPTER_ROUTES:  # they accept any folder
                return await _error(404, "use /load_lora_adapter or /unload_lora_adapter")(
                    scope, receive, send
                )
            if (route := self.routes.get((scope["method"], scope["path"]))) is not None:
                response = await route(request)
                return await response(scope, receive, send)
            if scope["path"] != GENERATE and scope["method"] != "GET":
                body, receive = await read_body(request)
                if (refusal := refused_template(body, self.state.template_settings)) is not None:
                    return await _error(400, refusal)(scope, receive, send)
            elif scope["path"] == GENERATE and (self.state.returns_experts or self.state.numbers_tokens):
                receive, send = await rewrite_response(request, send, has_experts=self.state.returns_experts)
        elif scope["type"] == "websocket":  # vLLM's realtime route: not part of a run
            return await send({"type": "websocket.close", "code": 1008})
        return await self.app(scope, receive, send)

    def _with_version(self, send: Send) -> Send:
        async def send_with_version(message: Message) -> None:
            if message["type"] == "http.response.start":
                version = (VERSION_HEADER.encode(), str(self.state.version).encode())
                message = {**message, "headers": [*message.get("headers", ()), version]}
            await send(message)

        return send_with_version

    # -- routes ------------------------------------------------------------------------------------
    async def show_state(self, _: Request) -> JSONResponse:
        return JSONResponse(self.state.public())

    async def pause(self, request: Request) -> JSONResponse:
        """Pause generation. ``clear_cache``: recompute the KV of requests in flight with the next weights."""
        body = await _json(request)
        async with self.state.lock:
            if not self.state.asleep:
                await _engine(request).pause_generation(
                    mode="keep", clear_cache=bool(body.get("clear_cache", False))
                )
            self.state.paused = True
        return JSONResponse({"paused": True})

    async def resume(self, request: Request) -> JSONResponse:
        async with self.state.lock:
            if not self.state.asleep:
                await _engine(request).resume_generation()
                self.state.paused = False
        return JSONResponse({"paused": self.state.paused})

    async def sleep(self, request: Request) -> JSONResponse:
        """Freeze requests, whose KV cache is computed again later, and free the memory of the accelerators."""
        async with self.state.lock:
            if not self.state.asleep:
                await self._fall_asleep(request)
                logger.info("sleeping; policy version %d was served last", self.state.version)
        return JSONResponse({"asleep": True})

    async def wake_up(self, request: Request) -> JSONResponse:
        """Continue with the same weights. 409: they were dropped."""
        async with self.state.lock:
            if self.state.asleep and self.state.sleep_level > 1:
                return _error(409, "the weights were dropped: wake the engine with /update_weights")
            if self.state.asleep:
                await _engine(request).wake_up()
                self.state.paused = self.state.asleep = False
        return JSONResponse({"asleep": False})

    async def _fall_asleep(self, request: Request) -> None:
        await _engine(request).sleep(level=self.state.sleep_level, mode="keep")
        self.state.paused = self.state.asleep = True

    async def update_weights(self, request: Request) -> JSONResponse:
        """Load a policy version in place on every rank: a model's weights, or an adapter.

        400: malformed request; 403: a folder outside the run; 422: a worker cannot load the version, and the old
        weights remain; 500: the load failed half-way or did not write every parameter, and the engine exits.
        """
        return await self._update(request, await _json(request))

    async def reload_weights(self, request: Request) -> JSONResponse:
        """Load version 0 again. 409: policy versions are adapters, and the base model is served under its own name."""
        if self.state.adapter is not None:
            return _error(
                409, f"'{self.state.adapter}' is an adapter: request the base model by its own name instead"
            )
        return await self._update(request, {"path": self.state.base_path, "version": 0})

    async def load_lora_adapter(self, request: Request) -> JSONResponse:
        """Serve an adapter under a name of its own; a name that is already served gets the new files.

        400: malformed request; 403: a folder outside `adapter_roots`; 409: no room, the name of the policy or the base
        model, or an engine that sleeps; 422: vLLM cannot load the adapter, and what was served before still is.
        """
        from primerl_hpc.inference import vllm_compat

        body, models = await _json(request), request.app.state
        name, path = body.get("lora_name"), body.get("lora_path")
        if not (isinstance(name, str) and name and isinstance(path, str) and path):
            return _error(400, "lora_name and lora_path must be non-empty texts")
        if not _is_within(path, self.state.adapter_roots):
            return _error(
                403, f"{path} is neither in the run directory nor in a folder of inference.adapter_dirs"
            )
        async with self.state.lock:
            if (refusal := self._refused_adapter(name, models)) is not None:
                return _error(409, refusal)
            if (fault := _adapter_fault(Path(path), self.state.adapter_roots)) is not None:
                return _error(422, f"{path}: {fault}")
            try:
                read_headers(Path(path))
                await vllm_compat.load_adapter(models, name, path)
            except Exception as error:  # noqa: BLE001 (whatever a worker raised, it has not replaced the adapter)
                return _error(422, f"{path} cannot be loaded: {type(error).__name__}: {error}")
            # prefixes are cached by the adapter's name
            await _engine(request).reset_prefix_cache()
        logger.info("serving adapter %s from %s", name, path)
        return self._adapters(models)

    def _refused_adapter(self, name: str, models: Any) -> str | None:
        """Return why no adapter can be loaded under ``name`` now; None if it can."""
        from primerl_hpc.inference import vllm_compat

        if not self.state.max_adapters:
            return (
                "this engine was started without room for adapters; set inference.adapter_dirs in the recipe"
            )
        if self.state.asleep:
            return "the engine sleeps during the trainer's turn; try again after it"
        if name == self.state.adapter or name in vllm_compat.base_model_names(models):
            return f"'{name}' is the name of the policy or the base model; choose another name"
        others = vllm_compat.adapter_names(models) - {self.state.adapter, name}
        if len(others) >= self.state.max_adapters:
            return f"{len(others)} adapters are served already; unload one, or raise inference.max_adapters"
        return None

    async def unload_lora_adapter(self, request: Request) -> JSONResponse:
        """Stop serving an adapter. 400: malformed request; 404: no such adapter; 409: it is the policy."""
        from primerl_hpc.inference import vllm_compat

        name, models = (await _json(request)).get("lora_name"), request.app.state
        if not (isinstance(name, str) and name):
            return _error(400, "lora_name must be a non-empty text")
        async with self.state.lock:
            if name == self.state.adapter:
                return _error(409, f"'{name}' is the policy, which this engine always serves")
            if name not in vllm_compat.adapter_names(models):
                return _error(404, f"no adapter is called '{name}'")
            await vllm_compat.unload_adapter(models, name)
            await _engine(request).reset_prefix_cache()  # its name may return with other weights
        logger.info("unloaded adapter %s", name)
        return self._adapters(models)

    def _adapters(self, models: Any) -> JSONResponse:
        from primerl_hpc.inference import vllm_compat

        return JSONResponse({"adapters": sorted(vllm_compat.adapter_names(models) - {self.state.adapter})})

    async def _update(self, request: Request, body: dict[str, Any]) -> JSONResponse:
        try:
            source, version = from_body(body)
        except ValueError as error:
            return _error(400, str(error))
        if (foreign := self._foreign_folder(source)) is not None:
            return _error(403, f"{foreign} is neither in a folder of this run nor its base model")
        async with self.state.lock:
            load = self._load_model if self.state.adapter is None else self._load_adapter
            was_asleep = self.state.asleep
            if was_asleep:  # the KV cache follows when the load has freed its buffers
                await _engine(request).wake_up(tags=["weights"])
            if (refusal := await load(request, body)) is not None:
                if was_asleep:
                    await self._fall_asleep(request)
                return refusal
            self.state.version = version
            # requests without a cache salt must not match prefixes of the old weights; blocks in use are kept
            await _engine(request).reset_prefix_cache()
            # workers have dropped what the tower made of images; without this, requests would expect it
            await _engine(request).reset_encoder_cache()
            if was_asleep:  # this resumes generation
                await _engine(request).wake_up(tags=["kv_cache"])
                self.state.paused = self.state.asleep = False
        logger.info("serving policy version %d from %s", version, describe(source, version))
        return JSONResponse({"version": version})

    def _foreign_folder(self, source: str | DeltaChain | RankAssignment) -> str | None:
        """Return the first path outside the permitted folders; None if there is none.

        Otherwise a client with the API key could make the engine copy any file that the user can read.
        """
        if self.state.weight_roots is None or isinstance(source, RankAssignment):
            return None
        paths = (
            [source.path, *dict(source.links).values()] if isinstance(source, DeltaChain) else [str(source)]
        )
        for path in paths:
            if path != self.state.base_path and not _is_within(path, self.state.weight_roots):
                return path
        return None

    async def _load_model(self, request: Request, body: dict[str, Any]) -> JSONResponse | None:
        """Load in two calls to all workers of all data-parallel ranks: no tensor is replaced unless all can load it."""
        from primerl_hpc.inference.vllm_compat import ask_workers

        path, engine = body["path"], _engine(request)
        try:
            workers = await ask_workers(engine, "primerl_prepare_update", (body,))
            if refused := [worker for worker in workers if "error" in worker]:
                if len(refused) == len(workers):
                    return _error(422, refused[0]["error"])
                await ask_workers(engine, "primerl_discard_update", (body,))
                first = f"worker {refused[0]['rank']}: {refused[0]['error']}"
                return _error(422, f"{len(refused)} of {len(workers)} workers cannot load {path}; {first}")
            await ask_workers(engine, "primerl_update_weights", (body,))
        except Exception as error:  # noqa: BLE001 (whatever a worker raised, its model may be incomplete)
            return self._fail(f"loading {path} failed half-way: {type(error).__name__}: {error}")
        return None

    async def _load_adapter(self, request: Request, body: dict[str, Any]) -> JSONResponse | None:
        from primerl_hpc.inference import vllm_compat

        assert self.state.adapter is not None
        path = body["path"]
        try:
            tensors = read_headers(Path(path))
            if self.state.adapter_tensors is not None:
                check_same_model(tensors, self.state.adapter_tensors, is_tied=False, location=path)
        except (DataError, OSError) as error:
            return _error(422, str(error))
        try:
            await vllm_compat.load_adapter(request.app.state, self.state.adapter, path)
        except Exception as error:  # noqa: BLE001 (whatever a worker raised, it has not replaced the adapter)
            return _error(422, f"{path} cannot be loaded: {type(error).__name__}: {error}")
        self.state.adapter_tensors = tensors
        return None

    def _fail(self, cause: str) -> JSONResponse:
        if self.state.fault is not None and not self.state.fault.done():
            self.state.fault.set_exception(RoleError(cause))
        return _error(500, cause)


def _is_within(path: str, roots: Iterable[Path]) -> bool:
    """True if ``path`` is in one of the folders, after symbolic links are followed."""
    resolved = Path(path).resolve()
    return any(resolved.is_relative_to(root.resolve()) for root in roots)


def _adapter_fault(folder: Path, roots: Iterable[Path]) -> str | None:
    """Return why the files of an adapter must not be loaded; None if they may.

    Without ``adapter_model.safetensors`` vLLM would unpickle ``adapter_model.bin``.
    """
    for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG):
        if not (folder / name).is_file():
            return f"it contains no {name}"
        if not _is_within(str(folder / name), roots):
            return f"{name} is a link out of the permitted folders"
    return None


def _engine(request: Request) -> Any:
    return request.app.state.engine_client


def _error(status: int, cause: str) -> JSONResponse:
    return JSONResponse({"error": cause}, status_code=status)


async def _json(request: Request) -> dict[str, Any]:
    """Return the body as an object; {} if it is empty or malformed."""
    try:
        body = await request.json()
    except (JSONDecodeError, UnicodeDecodeError):
        return {}
    return body if isinstance(body, dict) else {}
