"""Who hangs: a run that shows nothing new, and a server that takes connections and answers none.

A frozen process does not exit, so nobody is told. `StallClock` knows how long a run may be silent from what it did so
far; `HealthWatch` asks every engine and the router for a sign of life. Whoever is found is ended by the supervisor and
treated like one that died by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from primerl_hpc.common.names import Kind, Role, process_name
from primerl_hpc.common.rundir import RunDir, read_endpoint

PAUSES = 10
"""A pause that is so many times longer than the longest so far is more than a slow step."""
ASK_EVERY_S = 5.0
ANSWER_S = 10.0
SILENT_PORT = 1
"""Where nobody listens: a host that is there refuses it at once."""


@dataclass
class StallClock:
    """Pure: times and a number that progress changes in, a verdict out."""

    limit_s: float
    since: float
    progress: int = 0
    longest_s: float = 0.0

    def look(self, now: float, progress: int, *, is_due: bool) -> float | None:
        """Seconds without progress when they are too many. ``is_due``: nothing is still starting."""
        if progress != self.progress or not is_due:  # less: a recovery dropped what was lost
            if self.progress and is_due:
                self.longest_s = max(self.longest_s, now - self.since)
            self.since, self.progress = now, progress
            return None
        silent_s = now - self.since
        return silent_s if silent_s > max(self.limit_s, PAUSES * self.longest_s) else None

    def restart(self, now: float) -> None:
        self.since = now


def suspect(kind: Kind, last_batch: int, last_step: int) -> str:
    """Who holds a silent run up: the trainer when it has a batch that it did not finish, else who makes batches."""
    if kind == Kind.SFT:
        return process_name(Role.SFT, 0)
    return process_name(Role.TRAINER if last_batch > last_step else Role.ORCHESTRATOR, 0)


@dataclass(frozen=True)
class _Silence:
    url: str
    since: float
    """When the first question without an answer was asked."""
    until: float
    """When the last one was given up."""


class HealthWatch:
    """Asks published HTTP servers of a phase again and again; `is_hung` says whether one was silent for too long.

    That is two questions without an answer at least, the first of them more than ``limit_s`` before the last one's end: a server
    that was late once is none that hangs.
    """

    def __init__(self, run: RunDir, processes: list[str], limit_s: float) -> None:
        self.run, self.processes, self.limit_s = run, processes, limit_s
        self._silent: dict[str, _Silence] = {}

    def is_hung(self, process: str) -> bool:
        silence = self._silent.get(process)
        return silence is not None and silence.until - silence.since > self.limit_s

    def forget(self, process: str) -> None:
        self._silent.pop(process, None)

    async def watch(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # of the run directory: it says nothing of the servers
                await asyncio.gather(*(self._ask(process) for process in self.processes))
            await asyncio.sleep(min(ASK_EVERY_S, self.limit_s / 4))

    async def _ask(self, process: str) -> None:
        endpoint = read_endpoint(self.run, process) or {}
        url, asked_at = str(endpoint.get("url", "")), time.monotonic()
        if not url.startswith("http://") or await is_answering(url, min(ANSWER_S, self.limit_s / 2)):
            self.forget(process)
        else:
            self.note_silence(process, url, asked_at, time.monotonic())

    def note_silence(self, process: str, url: str, asked_at: float, now: float) -> None:
        """A question of ``asked_at`` was given up ``now``."""
        silence = self._silent.get(process)
        since = asked_at if silence is None or silence.url != url else silence.since
        self._silent[process] = _Silence(url, since, now)


async def is_answering(url: str, timeout_s: float) -> bool:
    """False when a server said nothing in time, or its queue of connections is so full that it took none.

    A refused connection is an answer here: its process has ended, and the supervisor knows. So is the silence of a whole
    host: its node is lost, and the scheduler says so.
    """
    parts, writer = urlsplit(url), None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
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
    except OSError:  # a timeout is one
        return False
    writer.close()
    return True
