"""Remote prefill: ASGI middleware around vLLM's app on a decode engine (``layout.inference.prefill``).

    client         ── POST /v1/completions, /v1/chat/completions, /inference/v1/generate ──►  decode engine
    decode engine  ── the same prompt, for one token ──►  prefill engine
                   ◄── location of its KV blocks (``kv_transfer_params``) ──
    vLLM in the decode engine pulls the blocks (NIXL) and samples every token that the client receives.

All requests of a session (header X-Session-ID) use one prefill engine, which has the earlier turns in its cache;
requests without a session use the engine with the fewest requests in flight from here. If remote prefill fails for
any reason, the decode engine prefills locally. The metrics ``primerl_prefill_total{by="other"}`` and ``{by="self"}``
count both cases.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
import zlib
from collections import Counter
from json import JSONDecodeError
from typing import Any

import httpx
import prometheus_client
from starlette.types import ASGIApp, Receive, Scope, Send

from primerl_hpc.common.names import Role
from primerl_hpc.inference.chat_requests import replay_body
from primerl_hpc.run.access.keys import RunKeys, run_keys
from primerl_hpc.run.calls import while_published
from primerl_hpc.run.endpoints import PublishedEngines
from primerl_hpc.run.rundir import VERSION_HEADER, RunDir

logger = logging.getLogger(__name__)

TOKENS_IN = "/inference/v1/generate"
ROUTES = frozenset({"/v1/completions", "/v1/chat/completions", TOKENS_IN})
POLL_S = 1.0
CONNECT_S = 5.0
_OUTPUT_PARAMETERS = frozenset(
    {
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
    }
)
_PREFILLS = prometheus_client.Counter(
    "primerl_prefill", "Prompts prefilled by another engine (other), or locally if none could (self).", ["by"]
)


def prefill_request(path: str, body: Any) -> dict[str, Any] | None:
    """Return a request for one token of the same prompt; None if the request must be prefilled locally.

    These are malformed bodies (vLLM reports the error), requests for a single token, and what vLLM's connector does not
    support: several samples or prompts, log-probabilities of the prompt, and images.
    """
    parameters = body.get("sampling_params") if path == TOKENS_IN and isinstance(body, dict) else body
    if not isinstance(parameters, dict) or body.get("kv_transfer_params") is not None:
        return None
    limit = parameters.get("max_completion_tokens") or parameters.get("max_tokens")
    if limit == 1 or (parameters.get("n") or 1) != 1 or parameters.get("prompt_logprobs") is not None:
        return None
    prompt = body.get("prompt")
    if body.get("echo") or body.get("use_beam_search") or (isinstance(prompt, list) and not _is_ids(prompt)):
        return None
    if body.get("features") or _has_images(body.get("messages")):
        return None
    short = {name: value for name, value in parameters.items() if name not in _OUTPUT_PARAMETERS}
    short["max_tokens"] = 1
    if path == TOKENS_IN:
        rest = {name: value for name, value in body.items() if name not in _OUTPUT_PARAMETERS}
        short = {**rest, "sampling_params": short}
    return {**short, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}


def _is_ids(prompt: list[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)


def _has_images(messages: Any) -> bool:
    """True if a message has a part that is not text."""
    messages = messages if isinstance(messages, list) else []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") != "text" for part in parts)


class RemotePrefill:
    """Middleware that requests the prefill of each prompt from a prefill engine."""

    def __init__(self, app: ASGIApp, run: RunDir, state: Any) -> None:
        """``state``: the `EngineState` of this process."""
        self.app, self.state = app, state
        self.engines = PrefillEngines(run, run_keys(run))
        self.is_local = False
        """True while prompts are prefilled locally, because the last request to the prefill engines failed."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in ROUTES:
            return await self.app(scope, receive, send)
        if (raw := await _read(receive)) is None:
            return None
        try:
            body = json.loads(raw)
        except (JSONDecodeError, UnicodeDecodeError):
            body = None
        disconnected = asyncio.ensure_future(receive())  # after the body, the next message is the disconnect
        try:
            request = prefill_request(scope["path"], body)
            if request is not None and body is not None:
                prefill = asyncio.ensure_future(self._prefill(scope, request))
                try:
                    await asyncio.wait({prefill, disconnected}, return_when=asyncio.FIRST_COMPLETED)
                    if not prefill.done():
                        return None
                    if (params := prefill.result()) is not None:
                        raw = json.dumps({**body, "kv_transfer_params": params}).encode()
                finally:
                    prefill.cancel()
            await self.app(_with_length(scope, len(raw)), replay_body(raw, disconnected), send)
        finally:
            disconnected.cancel()

    async def _prefill(self, scope: Scope, request: dict[str, Any]) -> dict[str, Any] | None:
        """Have a prefill engine process the prompt. Returns the location of its KV blocks; None: prefill locally."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        for name, url in await self.engines.in_order(headers.get("x-session-id")):
            try:
                response = await self.engines.post(name, url + scope["path"], request)
            except httpx.HTTPError as error:
                self._log_change(f"{name}: {type(error).__name__} {error}")
                continue
            if response.is_client_error:
                return None  # an invalid request: vLLM in this engine reports the error
            params = response.json().get("kv_transfer_params") if response.is_success else None
            if params is None:
                self._log_change(f"{name}: HTTP {response.status_code} {response.text[:200]}")
            elif response.headers.get(VERSION_HEADER) != str(self.state.version):
                await self._release_blocks(scope, params)  # only one of the engines has the new version yet
                break
            else:
                self._log_change(None)
                _PREFILLS.labels("other").inc()
                return dict(params)
        else:
            self._log_change("no prefill engine available")
        _PREFILLS.labels("self").inc()
        return None

    async def _release_blocks(self, scope: Scope, params: dict[str, Any]) -> None:
        """Notify the prefill engine that its blocks will not be pulled."""
        engine = scope["app"].state.engine_client
        await engine.notify_kv_transfer_request_rejected(f"unused-{uuid.uuid4().hex}", params)

    def _log_change(self, fault: str | None) -> None:
        """Log when remote prefill starts to fail, and when it works again (``fault`` None)."""
        if fault is not None and not self.is_local:
            logger.warning("%s; prefilling locally", fault)
        elif fault is None and self.is_local:
            logger.info("remote prefill works again")
        self.is_local = fault is not None


class PrefillEngines:
    """The prefill engines that are published in the run directory."""

    def __init__(self, run: RunDir, keys: RunKeys) -> None:
        self.in_flight: Counter[str] = Counter()  # requests from this process, by engine
        self._published = PublishedEngines(run, Role.PREFILL.value, busy_s=POLL_S)
        self._client = keys.async_client(
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def in_order(self, session: str | None) -> list[tuple[str, str]]:
        """Return (name, URL) of the engines in the order in which to try them."""
        urls = await self._urls()
        if session is None:
            return sorted(urls.items(), key=lambda engine: (self.in_flight[engine[0]], engine[0]))
        return sorted(urls.items(), key=lambda engine: zlib.crc32(f"{session} {engine[0]}".encode()))

    async def post(self, name: str, url: str, body: dict[str, Any]) -> httpx.Response:
        """Send a request and wait while the engine stays published at this URL. Raises httpx.HTTPError.

        There is no other time limit: the supervisor ends an engine that hangs.
        """

        async def is_published() -> bool:
            return url.startswith((await self._urls()).get(name, "?"))

        self.in_flight[name] += 1
        try:
            return await while_published(self._client.post(url, json=body), is_published, poll_s=POLL_S)
        finally:
            self.in_flight[name] -= 1

    async def _urls(self) -> dict[str, str]:
        """Return the URLs by name, as the run directory was last listed."""
        return await asyncio.to_thread(self._published.urls)


async def _read(receive: Receive) -> bytes | None:
    """Return the request's body; None if the client disconnected."""
    parts, has_more = [], True
    while has_more:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        has_more = message.get("more_body", False)
    return b"".join(parts)


def _with_length(scope: Scope, length: int) -> Scope:
    others = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    return {**scope, "headers": [*others, (b"content-length", str(length).encode())]}
