"""Reject requests that contain a chat template, or template settings that the model's own template does not use.

vLLM 0.31 has CVE-2026-115911 and PYSEC-2026-4349: rendering a template from a request, or one with settings from a
request, may never terminate. vLLM 0.32 fixes this (docs/decisions/0001-versions.md).
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request
from starlette.types import Message, Receive

_WORD = b"chat_template"


async def read_body(request: Request) -> tuple[bytes, Receive]:
    """Read the complete body. Returns it and a replacement for ``receive`` that replays it to the application."""
    body = await request.body()
    is_replayed = False

    async def receive() -> Message:
        nonlocal is_replayed
        if is_replayed:
            return await request.receive()
        is_replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return body, receive


def replay_body(body: bytes, then: asyncio.Future[Message]) -> Receive:
    """Return a ``receive`` that yields ``body`` and afterwards the message ``then``."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return first.pop() if first else await asyncio.shield(then)

    return receive


def refused_template(body: bytes, allowed: frozenset[str]) -> str | None:
    """Return why the request must not reach vLLM; None if it may. ``allowed``: permitted ``chat_template_kwargs``."""
    if _WORD not in body and b"\\u" not in body:  # the word could be written with escapes
        return None
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return "a request with a chat template must be JSON" if _WORD in body else None
    for fields in content if isinstance(content, list) else [content]:
        if isinstance(fields, dict) and (refusal := _refused_fields(fields, allowed)) is not None:
            return refusal
    return None


def _refused_fields(fields: dict[str, Any], allowed: frozenset[str]) -> str | None:
    if fields.get("chat_template") is not None:
        return "a request must not contain chat_template: the model's own template is used"
    kwargs = fields.get("chat_template_kwargs")
    if not kwargs:
        return None
    if not isinstance(kwargs, dict):
        return "chat_template_kwargs must be an object"
    if unknown := sorted(set(kwargs) - allowed):
        known = ", ".join(sorted(allowed)) or "none"
        return f"chat_template_kwargs must not set {', '.join(unknown)}; the model's template uses: {known}"
    return None
