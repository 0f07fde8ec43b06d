"""Await an HTTP request without a time limit, but give up when the server's endpoint disappears.

A lost node does not close its connections, so the client would wait forever.

response = await while_published(client.post(url, json=body), is_published, poll_s=1.0)     # or httpx.ReadError
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import httpx


async def while_published(
    request: Coroutine[Any, Any, httpx.Response],
    is_published: Callable[[], Awaitable[bool]],
    *,
    poll_s: float,
) -> httpx.Response:
    """Return the response. Raises httpx.ReadError when ``is_published()`` returns False, and what ``request``
    raises."""
    call = asyncio.ensure_future(request)
    try:
        while not (await asyncio.wait({call}, timeout=poll_s))[0]:
            if not await is_published() and not call.done():
                raise httpx.ReadError("the server's endpoint was removed during the request")
        return call.result()
    finally:
        call.cancel()
