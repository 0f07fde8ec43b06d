"""The experts that vLLM chose, in the form that the verifiers client reads.

vLLM sends ``"routed_experts": "<base64 of an .npy file>"``, the client expects ``{"data": "<base64 of the numbers>", "shape":
[tokens, layers, k], "start": first token, "dtype": "uint8"}``, in this order. A reply is megabytes of it: it is cut out
and put in again, and never parsed as JSON.
"""

from __future__ import annotations

import binascii
import io
import json
import re

import numpy as np
from starlette.requests import Request
from starlette.types import Message, Receive, Send

GENERATE = "/inference/v1/generate"
THEIRS = re.compile(rb'"routed_experts":"([^"]*)"')
START = re.compile(rb'"routed_experts_prompt_start":\s*(\d+)')


def reworded(reply: bytes, start: int) -> bytes:
    """``start``: the token whose experts come first."""
    return THEIRS.sub(lambda found: _ours(found[1], start), reply)


def _ours(theirs: bytes, start: int) -> bytes:
    file = io.BytesIO(binascii.a2b_base64(theirs))
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    rest = json.dumps({"shape": shape, "start": start, "dtype": dtype.name}, separators=(",", ":"))
    numbers = binascii.b2a_base64(file.getbuffer()[file.tell() :], newline=False)
    return b'"routed_experts":{"data":"' + numbers + b'",' + rest[1:].encode()


async def rewording(request: Request, send: Send) -> tuple[Receive, Send]:
    """What the application behind a middleware gets instead, of a request for tokens."""
    asked = await request.body()
    found = START.search(asked)
    start = int(found[1]) if found else 0
    is_given = False
    head: Message | None = None
    parts: list[bytes] = []

    async def receive() -> Message:
        nonlocal is_given
        if is_given:
            return await request.receive()
        is_given = True
        return {"type": "http.request", "body": asked, "more_body": False}

    async def send_it(message: Message) -> None:
        nonlocal head
        if message["type"] == "http.response.start" and _is_json(message):
            head = message
        elif head is None:  # a stream of events: not what the client asks for
            await send(message)
        else:
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                body = reworded(b"".join(parts), start)
                others = [each for each in head["headers"] if each[0].lower() != b"content-length"]
                await send({**head, "headers": [*others, (b"content-length", str(len(body)).encode())]})
                await send({"type": "http.response.body", "body": body})

    return receive, send_it


def _is_json(head: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"application/json")
        for name, value in head.get("headers", ())
    )
