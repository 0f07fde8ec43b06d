"""Model calls of an agent loop inside the environment server, without HTTP.

    track_servers()                                      # once, before verifiers serves
    response = await call(secret, body, retry=0)         # like POST {endpoint}/chat/completions with this secret

verifiers serves every rollout's model calls on a local HTTP endpoint, because agents may be programs. A loop in the
same process calls the handler of that endpoint directly: the same limits, stop conditions, interceptors, retries and
records of the trace, without sockets.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from multidict import CIMultiDict

ROUTE = "/v1/chat/completions"
RETRY_HEADER = "x-stainless-retry-count"
"""Marks the request as a retry; the endpoint would otherwise fork the trace."""

_handlers: dict[str, Any] = {}
"""Handler of the endpoint by the secret of a running rollout."""


@dataclass(frozen=True)
class ModelResponse:
    status: int
    body: bytes


class _LocalRequest(dict[Any, Any]):
    """The part of aiohttp's request that the endpoint reads."""

    path = ROUTE

    def __init__(self, body: bytes, headers: dict[str, str]) -> None:
        super().__init__()
        self.headers = CIMultiDict(headers)
        self._body = body
        self._read_bytes: bytes | None = None

    async def read(self) -> bytes:
        return self._body


def track_servers() -> None:
    """Patch verifiers' endpoint in this process to announce the rollouts that it serves."""
    from verifiers.v1.dialects import DIALECTS
    from verifiers.v1.dialects.chat import ChatDialect
    from verifiers.v1.interception.server import InterceptionServer

    chat = next(dialect for dialect in DIALECTS if isinstance(dialect, ChatDialect))
    register, unregister = InterceptionServer.register, InterceptionServer.unregister

    def register_here(self: Any, session: Any) -> tuple[str, str]:
        secrets = register(self, session)
        _handlers[secrets[0]] = self._handler_for(chat)
        return secrets

    def unregister_here(self: Any, model_secret: str, state_secret: str) -> None:
        _handlers.pop(model_secret, None)
        unregister(self, model_secret, state_secret)

    InterceptionServer.register, InterceptionServer.unregister = register_here, unregister_here


def is_here(secret: str) -> bool:
    """True if the rollout with this secret is served in this process, after `track_servers`."""
    return secret in _handlers


async def call(secret: str, body: bytes, retry: int = 0) -> ModelResponse:
    """Call the endpoint of a rollout for which `is_here` is true. ``retry``: number of earlier tries of this request.

    The handler is a task of its own, because the end of the rollout cancels the handlers that still run.
    """
    headers = {"Authorization": f"Bearer {secret}"} | ({RETRY_HEADER: str(retry)} if retry else {})
    response = await asyncio.ensure_future(_handlers[secret](_LocalRequest(body, headers)))
    return ModelResponse(response.status, bytes(response.body or b""))
