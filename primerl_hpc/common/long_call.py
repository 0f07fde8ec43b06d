"""A request that may take as long as it likes, but not longer than whoever is asked: a node that is lost closes no connection.

answer = await while_published(client.post(url, json=body), is_published, look_s=1.0)       # or httpx.ReadError
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
    look_s: float,
) -> httpx.Response:
    """The answer. Raises httpx.ReadError once ``is_published()`` says no, and what ``request`` raises."""
    call = asyncio.ensure_future(request)
    try:
        while not (await asyncio.wait({call}, timeout=look_s))[0]:
            if not await is_published() and not call.done():
                raise httpx.ReadError("it was ended meanwhile")
        return call.result()
    finally:
        call.cancel()
