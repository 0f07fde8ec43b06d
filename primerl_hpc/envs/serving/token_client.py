"""Requests of training rollouts to the run's engines: tokens as arrays, over one HTTP client.

    use_token_client(keys)          # in the environment server, before verifiers serves

renderers' client sends each request with the openai library and httpx, which examine all idle connections for each
request, and parses one JSON object per sampled token. This one replaces it for requests with the run's API key; other
models are reached as before. Both return the same result and raise the same errors.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import aiohttp

from primerl_hpc.run.access.keys import RunKeys
from primerl_hpc.transport.rollouts.token_arrays import MEDIA_TYPE, SampledTokens, decode

logger = logging.getLogger(__name__)

_ROUTE = "/inference/v1/generate"
_MISSING = -9999.0
"""vLLM's value of a log-probability that it does not have."""


def use_token_client(keys: RunKeys) -> None:
    """Patch renderers in this process."""
    from renderers import client

    client.generate = TokenClient(keys, client.generate).generate


class TokenClient:
    def __init__(self, keys: RunKeys, general: Any) -> None:
        """``general``: renderers' own function, for requests that this client does not send."""
        self.keys, self.general = keys, general
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, **request: Any) -> dict[str, Any]:
        """Replacement for ``renderers.client.generate``, with the same arguments and the same result.

        Raises OverlongPromptError, verifiers' ProviderError, MalformedGenerateResponseError.
        """
        is_general = (
            request["client"].api_key != self.keys.api_key
            or request.get("prompt_ids") is None
            or not request.get("process_multimodal", True)
            or any(request.get(name) is not None for name in ("multi_modal_data", "max_prompt_len"))
        )
        if is_general:
            return await self.general(**request)
        await _check_length(request)
        body, renderer = body_of(request), request["renderer"]
        choice = await self._post(request["client"], body, request.get("extra_headers") or {})
        parsed = renderer.parse_response(
            choice.token_ids, prompt_ids=list(request["prompt_ids"]), tools=request.get("tools")
        )
        return result_of(request, choice, parsed)

    async def _post(self, client: Any, body: bytes, headers: Mapping[str, str]) -> SampledTokens:
        """Send a request to the router. Raises ProviderError with the status that the agent sees."""
        from verifiers.v1.errors import ProviderError

        url = str(client.base_url).rstrip("/").removesuffix("/v1") + _ROUTE
        try:
            async with self._open().post(
                url, data=body, headers=headers, timeout=_timeout(client)
            ) as response:
                content = await response.read()
        except TimeoutError as error:
            raise ProviderError("Request timed out.", status_code=504) from error
        except aiohttp.ClientError as error:
            raise ProviderError(f"Connection error: {error}", status_code=503) from error
        if response.status >= 400:
            text = content.decode(errors="replace")
            raise ProviderError(f"Error code: {response.status} - {text}", status_code=response.status)
        return tokens_of(content, response.content_type)

    def _open(self) -> aiohttp.ClientSession:
        """Return the session; it is created in the event loop that uses it."""
        if self._session is None:
            headers = {**self.keys.headers, "Accept": MEDIA_TYPE, "Content-Type": "application/json"}
            connector = aiohttp.TCPConnector(limit=0, ssl=self.keys.client_context())
            self._session = aiohttp.ClientSession(connector=connector, headers=headers, trust_env=False)
        return self._session


async def _check_length(request: dict[str, Any]) -> None:
    """Raise OverlongPromptError for a prompt that exceeds the model's maximum, which the engine reports once."""
    from renderers.client import OverlongPromptError, _resolve_max_prompt_len

    limit, length = (
        await _resolve_max_prompt_len(request["client"], request["model"]),
        len(request["prompt_ids"]),
    )
    if limit is not None and length > limit:
        raise OverlongPromptError(prompt_len=length, max_prompt_len=limit)


def _timeout(client: Any) -> aiohttp.ClientTimeout:
    """Return the timeouts of an openai client: for connecting, and between two parts of the response."""
    timeout = client.timeout
    return aiohttp.ClientTimeout(total=None, sock_connect=timeout.connect, sock_read=timeout.read)


def body_of(request: dict[str, Any]) -> bytes:
    """Return the request as JSON, with the stop tokens of the renderer unless its parameters have ``ignore_eos``."""
    from pydantic_core import to_json

    parameters = {**(request.get("sampling_params") or {})}
    if not parameters.get("ignore_eos"):
        parameters["stop_token_ids"] = request["renderer"].get_stop_token_ids()
    parameters["logprobs"] = 1
    parameters.setdefault("skip_special_tokens", False)
    body: dict[str, Any] = {
        "model": request["model"],
        "token_ids": request["prompt_ids"],
        "sampling_params": parameters,
    }
    body |= {name: request[name] for name in ("cache_salt", "priority") if request.get(name) is not None}
    return to_json(body)


def tokens_of(content: bytes, content_type: str) -> SampledTokens:
    """Return the tokens of a response in either form. Raises MalformedGenerateResponseError."""
    from renderers.client import (
        MalformedGenerateResponseError,
        _parse_completion_logprobs,
        parse_generate_response,
    )

    if content_type == MEDIA_TYPE:
        try:
            tokens = decode(content)
        except ValueError as error:
            raise MalformedGenerateResponseError(f"Engine response: {error}") from error
        if _MISSING in tokens.logprobs or not all(map(math.isfinite, tokens.logprobs)):
            raise MalformedGenerateResponseError(
                "Engine response contains a log-probability without a value."
            )
        return tokens
    data = parse_generate_response(content)
    choice = (data.get("choices") or [{}])[0]
    ids = choice.get("token_ids") or []
    header = {name: choice.get(name) for name in ("finish_reason", "routed_experts", "sampling_mask")}
    return SampledTokens(
        ids, _parse_completion_logprobs(choice, ids), header | {"request_id": data.get("request_id")}
    )


def result_of(request: dict[str, Any], tokens: SampledTokens, parsed: Any) -> dict[str, Any]:
    """Return what ``renderers.client.generate`` returns for a text prompt."""
    from renderers.base import ToolCallParseStatus

    finish_reason = tokens.header.get("finish_reason")
    has_calls = any(call.status == ToolCallParseStatus.OK for call in parsed.tool_calls)
    return {
        "request_id": tokens.header.get("request_id") or "",
        "usage": None,
        "prompt_ids": list(request["prompt_ids"]),
        "renderer_prompt_ids": None,
        "mm_placeholders": None,
        "completion_ids": tokens.token_ids,
        "completion_logprobs": tokens.logprobs,
        "content": parsed.content,
        "reasoning_content": parsed.reasoning_content,
        "tool_calls": parsed.tool_calls,
        "finish_reason": "tool_calls" if has_calls and finish_reason == "stop" else finish_reason,
        "reasoning_complete": parsed.reasoning_complete,
        "routed_experts": tokens.header.get("routed_experts"),
        "sampling_mask": tokens.header.get("sampling_mask"),
        "multi_modal_data": None,
        "prompt_attribution": request.get("prompt_attribution"),
    }
