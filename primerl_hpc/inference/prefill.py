"""Somebody else's prefill, as a layer around vLLM's app on an engine that decodes (``layout.inference.prefill``).

    client  ── POST /v1/completions, /v1/chat/completions, /inference/v1/generate ──►  engine that decodes
    engine that decodes  ── the same prompt, for one token ──►  engine that prefills
                         ◄── where its KV blocks lie (``kv_transfer_params``) ──
    vLLM here pulls the blocks (NIXL) and samples every token that the client sees.

A session (header X-Session-ID) stays with one engine, where the earlier turns' prompt is cached; requests without one go to the
engine with the fewest of ours. Whatever goes wrong, this engine prefills by itself. Both ways are counted in /metrics:
``primerl_prefill_total{by="other"}`` and ``{by="self"}``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
import zlib
from collections import Counter
from json import JSONDecodeError
from typing import Any

import httpx
import prometheus_client
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from primerl_hpc.common.long_call import while_published
from primerl_hpc.common.names import Role
from primerl_hpc.common.rundir import VERSION_HEADER, RunDir, read_endpoints

logger = logging.getLogger(__name__)

TOKENS_IN = "/inference/v1/generate"
ROUTES = frozenset({"/v1/completions", "/v1/chat/completions", TOKENS_IN})
LOOK_S = 1.0
CONNECT_S = 5.0
_OF_THE_ANSWER = frozenset(
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
    "primerl_prefill", "Prompts read by another engine, or by this one where none could.", ["by"]
)


def prefill_request(path: str, body: Any) -> dict[str, Any] | None:
    """The same prompt for one token; None where there is nothing to hand over, or more than vLLM's connector does.

    That is: malformed bodies (vLLM answers them), one token, several samples or prompts, log-probabilities of the prompt, images.
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
    short = {name: value for name, value in parameters.items() if name not in _OF_THE_ANSWER}
    short["max_tokens"] = 1
    if path == TOKENS_IN:
        rest = {name: value for name, value in body.items() if name not in _OF_THE_ANSWER}
        short = {**rest, "sampling_params": short}
    return {**short, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}


def _is_ids(prompt: list[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)


def _has_images(messages: Any) -> bool:
    """Whether a part of a message is anything but text."""
    every = messages if isinstance(messages, list) else []
    contents = [each.get("content") for each in every if isinstance(each, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") != "text" for part in parts)


class RemotePrefill:
    def __init__(self, app: ASGIApp, run: RunDir, state: Any) -> None:
        """``state``: the `EngineState` of this process."""
        self.app, self.state = app, state
        self.engines = PrefillEngines(run, state.api_key)
        self.is_alone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in ROUTES:
            return await self.app(scope, receive, send)
        if (raw := await _read(receive)) is None:
            return None
        try:
            body = json.loads(raw)
        except (JSONDecodeError, UnicodeDecodeError):
            body = None
        gone = asyncio.ensure_future(receive())  # the next that comes is that the client has gone
        try:
            request = prefill_request(scope["path"], body)
            if request is not None:
                asked = asyncio.ensure_future(self._ask(scope, request))
                try:
                    await asyncio.wait({asked, gone}, return_when=asyncio.FIRST_COMPLETED)
                    if not asked.done():
                        return None
                    if (params := asked.result()) is not None:
                        raw = json.dumps({**body, "kv_transfer_params": params}).encode()
                finally:
                    asked.cancel()
            await self.app(_of_length(scope, len(raw)), _replay(raw, gone), send)
        finally:
            gone.cancel()

    async def _ask(self, scope: Scope, request: dict[str, Any]) -> dict[str, Any] | None:
        """Where the prompt's KV blocks are; None: nowhere."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        for name, url in await self.engines.in_order(headers.get("x-session-id")):
            try:
                answer = await self.engines.post(name, url + scope["path"], request)
            except httpx.HTTPError as error:
                self._note(f"{name}: {type(error).__name__} {error}")
                continue
            if answer.is_client_error:
                return None  # the client's fault, and for vLLM here to say
            params = answer.json().get("kv_transfer_params") if answer.is_success else None
            if params is None:
                self._note(f"{name}: HTTP {answer.status_code} {answer.text[:200]}")
            elif answer.headers.get(VERSION_HEADER) != str(self.state.version):
                await self._give_back(scope, params)  # an update reached one of us before the other
                break
            else:
                self._note(None)
                _PREFILLS.labels("other").inc()
                return dict(params)
        else:
            self._note("no engine that prefills is there")
        _PREFILLS.labels("self").inc()
        return None

    async def _give_back(self, scope: Scope, params: dict[str, Any]) -> None:
        """Blocks that nobody will pull."""
        engine = scope["app"].state.engine_client
        await engine.notify_kv_transfer_request_rejected(f"unused-{uuid.uuid4().hex}", params)

    def _note(self, fault: str | None) -> None:
        """Say when it begins, and when it is over."""
        if fault is not None and not self.is_alone:
            logger.warning("%s; prompts that no other engine reads are read here", fault)
        elif fault is None and self.is_alone:
            logger.info("prompts are read by other engines again")
        self.is_alone = fault is not None


class PrefillEngines:
    """Published engines that prefill, asked with the run's key."""

    def __init__(self, run: RunDir, api_key: str) -> None:
        self.run = run
        self.ours: Counter[str] = Counter()  # requests in flight
        self._urls: dict[str, str] = {}
        self._looked_at = -LOOK_S
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )

    async def in_order(self, session: str | None) -> list[tuple[str, str]]:
        """(name, URL), whom to ask first at the front."""
        urls = await self._look()
        if session is None:
            return sorted(urls.items(), key=lambda each: (self.ours[each[0]], each[0]))
        return sorted(urls.items(), key=lambda each: zlib.crc32(f"{session} {each[0]}".encode()))

    async def post(self, name: str, url: str, body: dict[str, Any]) -> httpx.Response:
        """As long as the engine is published there: one that hangs is ended by the supervisor. Raises httpx.HTTPError."""

        async def is_published() -> bool:
            return url.startswith((await self._look()).get(name, "?"))

        self.ours[name] += 1
        try:
            return await while_published(self._client.post(url, json=body), is_published, look_s=LOOK_S)
        finally:
            self.ours[name] -= 1

    async def _look(self) -> dict[str, str]:
        if time.monotonic() - self._looked_at >= LOOK_S:
            self._looked_at = time.monotonic()
            self._urls = await asyncio.to_thread(self._published)
        return self._urls

    def _published(self) -> dict[str, str]:
        """Without those whose restart was asked for."""
        return {
            name: str(end["url"])
            for name, end in read_endpoints(self.run, Role.PREFILL.value).items()
            if not self.run.restart_request(name).exists()
        }


async def _read(receive: Receive) -> bytes | None:
    """The request's body; None when the client has gone."""
    parts, has_more = [], True
    while has_more:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        has_more = message.get("more_body", False)
    return b"".join(parts)


def _replay(body: bytes, then: asyncio.Future[Message]) -> Receive:
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return first.pop() if first else await asyncio.shield(then)

    return receive


def _of_length(scope: Scope, length: int) -> Scope:
    others = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    return {**scope, "headers": [*others, (b"content-length", str(length).encode())]}
