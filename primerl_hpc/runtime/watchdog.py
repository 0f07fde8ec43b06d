"""Hang detection: a run without progress, and servers that accept connections but do not respond.

A frozen process does not exit. `StallClock` derives from the run's history how long it may go without progress;
`HealthWatch` sends health requests to every engine and the router. The supervisor kills a hung process and then handles
it like one that exited.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from primerl_hpc.common.names import Kind, Role, process_name

PAUSES = 10
"""A run is stalled after this many times its longest time between two signs of progress so far."""
ASK_EVERY_S = 5.0
ANSWER_S = 10.0
SILENT_PORT = 1
"""A port without a listener: a host that is up refuses connections to it immediately."""


@dataclass
class StallClock:
    """Pure: times and a progress number in, seconds without progress out."""

    limit_s: float
    since: float
    progress: int = 0
    longest_s: float = 0.0

    def seconds_stalled(self, now: float, progress: int, *, is_due: bool) -> float | None:
        """Return the seconds without progress if they exceed the limit. ``is_due``: all processes have started."""
        if progress != self.progress or not is_due:  # a decrease: a recovery dropped steps
            if self.progress and is_due:
                self.longest_s = max(self.longest_s, now - self.since)
            self.since, self.progress = now, progress
            return None
        silent_s = now - self.since
        return silent_s if silent_s > max(self.limit_s, PAUSES * self.longest_s) else None

    def restart(self, now: float) -> None:
        self.since = now


def suspect(kind: Kind, last_batch: int, last_step: int) -> str:
    """Return the process that stalls the run: the trainer if it has an unfinished batch, else the orchestrator."""
    if kind == Kind.SFT:
        return process_name(Role.SFT, 0)
    return process_name(Role.TRAINER if last_batch > last_step else Role.ORCHESTRATOR, 0)


@dataclass(frozen=True)
class _Silence:
    url: str
    since: float
    """When the first unanswered request was sent."""
    until: float
    """When the last unanswered request timed out."""


class HealthWatch:
    """Requests /health of the HTTP servers of a phase; `is_hung` reports servers that stopped responding.

    A server is hung after at least two unanswered requests in a row, the first of them sent more than ``limit_s``
    before the last one timed out: one late response is not a hang.
    """

    def __init__(
        self, urls: Callable[[], Mapping[str, str]], limit_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        """``urls``: returns the servers that are ready, by process, without reading files."""
        self.urls, self.limit_s, self.tls = urls, limit_s, tls
        self._silent: dict[str, _Silence] = {}

    def is_hung(self, process: str) -> bool:
        silence = self._silent.get(process)
        return silence is not None and silence.until - silence.since > self.limit_s

    def forget(self, process: str) -> None:
        self._silent.pop(process, None)

    async def watch(self) -> None:
        while True:
            await asyncio.gather(*(self._ask(process, url) for process, url in self.urls().items()))
            await asyncio.sleep(min(ASK_EVERY_S, self.limit_s / 4))

    async def _ask(self, process: str, url: str) -> None:
        asked_at = time.monotonic()
        limit_s = min(ANSWER_S, self.limit_s / 2)
        if not url.startswith(("http://", "https://")) or await is_answering(url, limit_s, self.tls):
            self.forget(process)
        else:
            self.note_silence(process, url, asked_at, time.monotonic())

    def note_silence(self, process: str, url: str, asked_at: float, now: float) -> None:
        """Record that a request sent at ``asked_at`` timed out at ``now``."""
        silence = self._silent.get(process)
        since = asked_at if silence is None or silence.url != url else silence.since
        self._silent[process] = _Silence(url, since, now)


async def is_answering(url: str, timeout_s: float, tls: ssl.SSLContext | None = None) -> bool:
    """False if the server did not respond in time, or its connection queue is full.

    A refused connection counts as an answer: its process has ended, which the supervisor notices. So does a host that
    does not respond at all: its node is lost, which the scheduler reports.
    """
    parts, writer = urlsplit(url), None
    try:
        async with asyncio.timeout(timeout_s):
            context = tls if parts.scheme == "https" else None
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=context)
            writer.write(
                f"GET /health HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode()
            )
            await writer.drain()
            await reader.readline()
            return True
    except TimeoutError:
        return writer is None and not await _is_up(str(parts.hostname), timeout_s)
    except OSError:
        return True
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _is_up(host: str, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, SILENT_PORT)
    except ConnectionRefusedError:
        return True
    except OSError:  # includes TimeoutError
        return False
    writer.close()
    return True
