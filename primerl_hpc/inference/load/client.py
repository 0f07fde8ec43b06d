"""One streamed request to an OpenAI-compatible server, with the arrival time of each token.

vLLM returns the ids of the tokens in each part of a response (``return_token_ids``), so that tokens are counted even
where several arrive together or have no text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from primerl_hpc.common.safety.error_text import describe_error
from primerl_hpc.inference.load.timing import RequestTimes

TIMEOUT_S = 3600.0
"""Time without any data after which a request has failed."""
_ERROR_CHARS = 200


@dataclass(frozen=True)
class LoadClient:
    """Sends requests for ``model`` to the server at ``url``, with the session's headers and certificates."""

    session: aiohttp.ClientSession
    url: str
    model: str

    async def request(self, prompt: Sequence[int], num_output: int) -> RequestTimes:
        """Sample exactly ``num_output`` tokens after ``prompt``; a failure is recorded in the result."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": num_output,
            "ignore_eos": True,
            "temperature": 1.0,
            "stream": True,
            "return_token_ids": True,
        }
        times = RequestTimes(len(prompt), time.perf_counter())
        timeout = aiohttp.ClientTimeout(total=None, sock_read=TIMEOUT_S)
        try:
            url = f"{self.url}/v1/completions"
            async with self.session.post(url, json=body, timeout=timeout) as response:
                if response.status != 200:
                    times.error = f"HTTP {response.status}: {(await response.text())[:_ERROR_CHARS]}"
                    return times
                rest = b""
                async for data in response.content.iter_any():
                    rest = note_data(times, rest + data, time.perf_counter())
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: not JSON
            times.error = describe_error(error)
        if times.error is None and times.num_output != num_output:
            times.error = f"{times.num_output} of {num_output} tokens arrived"
        return times


def note_data(times: RequestTimes, data: bytes, now: float) -> bytes:
    """Record the tokens of all complete lines of ``data``, which arrived together; return the incomplete last line.

    Raises ValueError for a line that is not JSON.
    """
    *lines, rest = data.split(b"\n")
    if count := sum(_count_tokens(times, line) for line in lines):
        times.arrivals.append((now, count))
    return rest


def _count_tokens(times: RequestTimes, line: bytes) -> int:
    """Return the number of tokens in one line of server-sent events; note an error that it reports."""
    if not line.startswith(b"data:") or (text := line[5:].strip()) == b"[DONE]":
        return 0
    part = json.loads(text)
    if "error" in part:
        times.error = str(part["error"])[:_ERROR_CHARS]
    return sum(len(choice.get("token_ids") or ()) for choice in part.get("choices", ()))
