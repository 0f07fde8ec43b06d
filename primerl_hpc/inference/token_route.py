"""Token ids in, token ids and log-probabilities out as arrays: ASGI middleware around vLLM's app.

    POST /inference/v1/generate, Accept: application/x-primerl-tokens
    {"token_ids": [...], "sampling_params": {...}}  →  `transport.rollouts.token_arrays`

The same request without this ``Accept`` is vLLM's own route, which describes each sampled token with a JSON object and
its text. Here nothing is turned into text, unless the request has stop strings, and no object is created for a token.
vLLM's handler checks the request and starts it, so parameters, adapters, sessions and data-parallel ranks have the same
meaning on both routes.
"""

from __future__ import annotations

import asyncio
import json
import logging
from json import JSONDecodeError
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from primerl_hpc.inference.chat_requests import read_body, replay_body
from primerl_hpc.inference.token_responses import GENERATE
from primerl_hpc.transport.rollouts.token_arrays import MEDIA_TYPE, SampledTokens, encode

logger = logging.getLogger(__name__)

_ACCEPT = (b"accept", MEDIA_TYPE.encode())
_JSON_ONLY = frozenset(("features", "content_parts", "stream", "return_token_ids"))
"""Fields of requests whose responses have no form as arrays."""


class TokenRoute:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._handler: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_generate = scope["type"] == "http" and scope["path"] == GENERATE and scope["method"] == "POST"
        if not is_generate or _ACCEPT not in scope["headers"]:
            return await self.app(scope, receive, send)
        raw, receive = await read_body(Request(scope, receive))
        body = array_request(raw)
        if body is None:
            return await self.app(scope, receive, send)
        await receive()  # the body; the next message is the disconnect
        work = asyncio.ensure_future(self._sample(scope, body))
        gone = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return  # the client disconnected: `finally` aborts its request in the engine
            if (tokens := work.result()) is None:
                await self.app(scope, replay_body(raw, gone), send)
            else:
                await _send(send, encode(tokens))
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.wait({gone, work})

    async def _sample(self, scope: Scope, body: dict[str, Any]) -> SampledTokens | None:
        """Return the sampled tokens; None if the request cannot be served, so that vLLM's route reports the error."""
        from primerl_hpc.inference import vllm_compat

        if self._handler is None:
            self._handler = vllm_compat.array_handler(scope["app"].state.serving_tokens)
        try:
            with vllm_compat.counted_request(scope["app"].state):
                return await vllm_compat.sample_arrays(self._handler, body, Request(scope))
        except Exception as error:  # noqa: BLE001 (vLLM's application maps each of its errors to a response)
            logger.debug("vLLM refused a request for arrays: %s", error)
            return None


async def _send(send: Send, body: bytes) -> None:
    headers = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def array_request(raw: bytes) -> dict[str, Any] | None:
    """Return the body of a request for one completion of a text prompt; None if vLLM's route has to respond."""
    try:
        body = json.loads(raw)
    except (JSONDecodeError, UnicodeDecodeError):
        return None
    parameters = body.get("sampling_params") if isinstance(body, dict) else None
    if not isinstance(parameters, dict) or any(body.get(name) for name in _JSON_ONLY):
        return None
    if parameters.get("n", 1) != 1 or parameters.get("prompt_logprobs") is not None:
        return None
    # only the sampled token's log-probability is returned, and text is needed only to find stop strings
    parameters |= {"logprobs": 0, "detokenize": bool(parameters.get("stop"))}
    return body
