"""Decide who uses the accelerators that engines and trainer share (``layout.colocated`` in mode ``sleep``).

    turns = DeviceTurns(run, fleet, attempt=env.attempt())
    await turns.run_with(main)         # main waits for turns.opened before it needs the engines

The trainer has the first turn of every incarnation: it builds its model and writes the version from which the run
resumes. Then the engines start. A turn of the trainer: stop dispatching → every engine sleeps → grant → the trainer
reports the end → the engines wake with the newest policy version.

An engine that exits while it sleeps is restarted by the supervisor, and waits for its grant before it starts vLLM. An
orchestrator that was restarted reads from the grant which engines may be awake, and puts them to sleep first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import Role, process_name
from primerl_hpc.common.waiting import retry_io
from primerl_hpc.orchestrator.engines.admin_client import EngineError
from primerl_hpc.orchestrator.engines.fleet import Fleet
from primerl_hpc.orchestrator.event_loop import run_with_background
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.turns import Grant, TurnRequest, read_grant, read_request, write_grant

logger = logging.getLogger(__name__)

POLL_S = 0.1
TRAINER = process_name(Role.TRAINER, 0)


async def _yes() -> bool:
    return True


async def _nothing() -> None:
    """Nothing to wake: the engines have not served yet."""


@dataclass
class TurnHooks:
    """Decisions and reactions of the train loop."""

    may_hand_over: Callable[[], Awaitable[bool]] = _yes
    """False while an evaluation runs, which should use one policy version."""
    on_sleep: Callable[[], None] = lambda: None
    wake: Callable[[], Awaitable[None]] = _nothing
    """Bring the engines to the newest version, which wakes them."""


class DeviceTurns:
    def __init__(self, run: RunDir, fleet: Fleet, *, attempt: int, num_engines: int) -> None:
        self.run, self.fleet, self.attempt = run, fleet, attempt
        self.names = [process_name(Role.INFERENCE, index) for index in range(num_engines)]
        self.hooks = TurnHooks()
        self.exclusive = asyncio.Lock()
        """Held during the trainer's turn and while engines load a version: one excludes the other."""
        self.opened = asyncio.Event()
        """Set when the trainer's first turn is over."""
        self.hand_over_seconds: list[float] = []
        self._grant = Grant(attempt)
        self._served: TurnRequest | None = None  # the trainer's last turn
        self._writing = asyncio.Lock()

    async def run_with(self, main: Coroutine[Any, Any, None]) -> None:
        """Run ``main`` to completion while turns are granted."""
        await self._restore()
        await run_with_background(main, self._serve_trainer(), self._serve_engines())

    def take_metrics(self) -> dict[str, float]:
        """Return the longest time from a request of the trainer to its grant since the last call."""
        seconds, self.hand_over_seconds = self.hand_over_seconds, []
        return {"time/hand_over": max(seconds)} if seconds else {}

    async def _restore(self) -> None:
        """Read which engines an earlier incarnation of this process has started."""
        found = await retry_io("the grant of the accelerators", lambda: read_grant(self.run))
        if found is not None and found.attempt == self.attempt:
            self._grant = found

    # -- trainer -----------------------------------------------------------------------------------
    async def _serve_trainer(self) -> None:
        while True:
            request = await self._request(TRAINER)
            if request is not None and self._is_new(request) and await self.hooks.may_hand_over():
                async with self.exclusive:
                    await self._give_turn(request)
            await asyncio.sleep(POLL_S)

    def _is_new(self, request: TurnRequest) -> bool:
        served = self._served
        return not request.is_released and (
            served is None or (request.incarnation, request.number) > (served.incarnation, served.number)
        )

    async def _give_turn(self, request: TurnRequest) -> None:
        started = time.monotonic()
        self.hooks.on_sleep()
        async with self._writing:  # from here on no engine is admitted
            self._grant = Grant(self.attempt, (request.incarnation, request.number), self._grant.engines)
        await self._sleep_engines()
        await self._write()
        self._served = request
        self.hand_over_seconds.append(time.monotonic() - started)
        while not self._is_over(await self._request(TRAINER), request):
            await asyncio.sleep(POLL_S)
        async with self._writing:
            self._grant = Grant(self.attempt, None, self._grant.engines)
        await self._write()
        if self.opened.is_set():
            await self.hooks.wake()
        self.opened.set()

    @staticmethod
    def _is_over(found: TurnRequest | None, request: TurnRequest) -> bool:
        """True if the trainer released this turn, or another incarnation of it asks for one."""
        if found is None:
            return False
        if found.incarnation != request.incarnation:
            return found.incarnation > request.incarnation
        return found.number > request.number or (found.number == request.number and found.is_released)

    # -- engines -----------------------------------------------------------------------------------
    async def _serve_engines(self) -> None:
        """Admit engines that ask to start, unless the trainer has its turn."""
        while True:
            if self.opened.is_set() and self._grant.trainer is None:
                requests = {name: await self._request(name) for name in self.names}
                asked = {
                    name: request.incarnation for name, request in requests.items() if request is not None
                }
                async with self._writing:
                    if self._grant.trainer is None and asked != dict(self._grant.engines):
                        self._grant = Grant(self.attempt, None, {**self._grant.engines, **asked})
                        await retry_io("the grant", lambda: write_grant(self.run, self._grant))
            await asyncio.sleep(POLL_S)

    async def _sleep_engines(self) -> None:
        """Put every admitted engine to sleep; one that has exited has freed its memory."""
        pending = dict(self._grant.engines)
        while True:
            results = await asyncio.gather(*(self._is_asleep(*engine) for engine in pending.items()))
            pending = {
                name: incarnation
                for (name, incarnation), is_asleep in zip(pending.items(), results, strict=True)
                if not is_asleep
            }
            if not pending:
                return
            await asyncio.sleep(POLL_S)

    async def _is_asleep(self, name: str, incarnation: int) -> bool:
        """Put one engine to sleep. False if it cannot be asked yet: it still starts, or its restart was requested."""
        request = await self._request(name)
        if request is not None and request.incarnation > incarnation:
            return True  # its successor waits for a grant
        if await asyncio.to_thread(self._has_exited, name, incarnation):
            return True
        engine = (await asyncio.to_thread(self.fleet.members)).get(name)
        if engine is None or engine.incarnation != incarnation or engine.attempt != self.attempt:
            return False
        try:
            await self.fleet.client.sleep(engine)
        except EngineError as error:
            logger.warning("%s does not sleep and will be restarted: %s", name, error)
            await asyncio.to_thread(self.fleet.request_restart, engine, str(error))
            return False
        return True

    def _has_exited(self, name: str, incarnation: int) -> bool:
        """True if the supervisor saw the end of this incarnation. Its restart may be recorded seconds later."""
        process = (read_json_or_none(self.run.state) or {}).get("processes", {}).get(name, {})
        return process.get("state") == "exited" and process.get("incarnation") == incarnation

    # -- files -------------------------------------------------------------------------------------
    async def _request(self, process: str) -> TurnRequest | None:
        return await retry_io(f"the turn of {process}", lambda: read_request(self.run, process, self.attempt))

    async def _write(self) -> None:
        async with self._writing:
            await retry_io("the grant of the accelerators", lambda: write_grant(self.run, self._grant))
