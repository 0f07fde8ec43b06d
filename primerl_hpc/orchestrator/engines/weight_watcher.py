"""Watch for new policy versions and bring the engines to them: pending → engines updated → live.

    watcher = WeightWatcher(run, fleet, reader, VersionHooks(…), base_model=…, engines_timeout_s=…)
    await watcher.load(version)        # at start: the engines serve the version from which the run resumes
    await watcher.watch()              # runs forever
    await watcher.hold()               # runs forever, without looking for new versions

The live version is leased until the next one is live, so that restarted engines can still be brought to it; the next
version is leased while engines load it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from primerl_hpc.common.errors import DataError, RoleError, TimeoutWaitingError
from primerl_hpc.common.files import write_json
from primerl_hpc.common.waiting import Polling, TransientIOErrors, paced, retry_io
from primerl_hpc.orchestrator.engines.delivery import is_repeatable
from primerl_hpc.orchestrator.engines.fleet import Fleet, UpdateReport
from primerl_hpc.run.leases import LEASE_REFRESH_S
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.weights.sources import Source, WeightReader

logger = logging.getLogger(__name__)

POLL_S, IDLE_POLL_S = 0.2, 10.0
RECONCILE_S = 2.0
READER = "orchestrator"


@dataclass(frozen=True)
class VersionHooks:
    """Decisions of the watcher's owner about new versions, and its notifications."""

    next_version: Callable[[int, int], int]
    """(live, newest) → which of the versions in (live, newest] to load."""
    on_pending: Callable[[int], None]
    on_live: Callable[[int], None]
    may_update: Callable[[], bool] = lambda: True
    """No version is loaded while it returns False."""
    exclusive: AbstractAsyncContextManager[Any] = field(default_factory=nullcontext)
    """Held while the watcher changes engines: the lock of `turns.DeviceTurns`."""


class WeightWatcher:
    """Keeps the engines at the newest policy version."""

    def __init__(
        self,
        run: RunDir,
        fleet: Fleet,
        reader: WeightReader,
        hooks: VersionHooks,
        *,
        base_model: str | None,
        engines_timeout_s: float,
        holder: str = READER,
    ) -> None:
        """``base_model``: source of v0; None if the trainer writes v0 like all other versions (adapters).

        ``engines_timeout_s``: give up if no engine is available for this long. ``holder``: name in the leases.
        """
        self.run, self.fleet, self.reader, self.base_model = run, fleet, reader, base_model
        self.engines_timeout_s = engines_timeout_s
        self.next_version, self.may_update = hooks.next_version, hooks.may_update
        self.on_pending, self.on_live, self.exclusive = hooks.on_pending, hooks.on_live, hooks.exclusive
        self.holder, self.version = holder, -1
        self.waiting_since = time.monotonic()  # start of the wait for the version after the live one
        self.update_seconds: list[float] = []
        self.paused_seconds: list[float] = []  # of them, from pausing the engines to resuming them
        self._leased_at = 0.0
        self._opened = -1  # last opened version
        self._source: Source = base_model or ""

    async def load(self, version: int) -> None:
        """Bring all engines to ``version`` and make it live. Raises RoleError if no engine loads it."""
        async with self.exclusive, self._renewed_leases():
            await self._load(version)

    async def load_again(self, version: int) -> None:
        """Call `load` for an earlier version. Raises DataError or FileNotFoundError if it no longer exists."""
        is_base = version == 0 and self.base_model is not None
        if not is_base and not await self._has(version):
            raise DataError(f"the weights of policy version {version} do not exist")
        await self.load(version)

    async def _load(self, version: int) -> None:
        if self.base_model is None:
            await self._wait_until_written(version)
        source = await self._open(version)
        while not await self._wait_until_served(source, version, await self.fleet.reconcile(source, version)):
            self.reader.give_up(version, source)
            await self._wait_until_written(version)
            source = await self._open(version)
        await self._mark_live(source, version)

    async def watch(self) -> None:
        """Load new versions as they appear, and bring restarted engines to the live one; runs forever."""
        next_reconcile = time.monotonic() + RECONCILE_S
        patience = TransientIOErrors("policy versions")
        while True:
            # checked before the newest version is read: one that is published in between is loaded
            may_update, newest = self.may_update(), None
            with patience:
                newest = await asyncio.to_thread(self.reader.newest)
            if not may_update:
                self.waiting_since = time.monotonic()
            if may_update and newest is not None and newest > self.version:
                async with self.exclusive:
                    await self._bring_to(newest)
            elif time.monotonic() >= next_reconcile:
                async with self.exclusive:
                    await self._reconcile()
                next_reconcile = time.monotonic() + RECONCILE_S
            await asyncio.sleep(paced(time.monotonic() - self.waiting_since, POLL_S, IDLE_POLL_S))

    async def hold(self) -> None:
        """Bring restarted engines to the live version, which stays the same; runs forever."""
        while True:
            await asyncio.sleep(RECONCILE_S)
            async with self.exclusive:
                await self._reconcile()

    async def wake(self) -> None:
        """Bring engines that sleep to the newest version, or to the live one again. The caller holds ``exclusive``."""
        newest = await retry_io("policy versions", self.reader.newest)
        if newest is not None and newest > self.version:
            await self._bring_to(newest)
        else:
            await self._reconcile()

    async def _bring_to(self, newest: int) -> None:
        if newest <= self.version:
            return  # engines that slept were brought to it meanwhile
        async with self._renewed_leases():
            await self._update(newest)

    def release(self) -> None:
        """Release the lease of the live version."""
        if self.version >= 0:
            self.reader.close(self.version, self.holder)

    def take_metrics(self) -> dict[str, float]:
        """Return metrics of the updates since the last call."""
        seconds, self.update_seconds = self.update_seconds, []
        paused, self.paused_seconds = self.paused_seconds, []
        if not seconds:
            return {}
        return {
            "time/weight_update": max(seconds),
            "time/engines_paused": max(paused),
            "watcher/updates": len(seconds),
        }

    async def _update(self, newest: int) -> None:
        version = self.next_version(self.version, newest)
        if version != newest and not await self._has(version):
            version = newest  # the version in between was deleted
        self.on_pending(version)
        start, paused_s = time.monotonic(), 0.0
        while True:
            source = await self._open(version)
            report = await self.fleet.update(source, version)
            paused_s += report.seconds
            if await self._wait_until_served(source, version, report):
                break
            version = await self._next_full_version(version, source)
        self.update_seconds.append(time.monotonic() - start)
        self.paused_seconds.append(paused_s)
        logger.info("policy v%d is live (%.2f s)", version, self.update_seconds[-1])
        await self._mark_live(source, version)

    async def _next_full_version(self, version: int, source: Source) -> int:
        """Wait for a full version after ``version``, which no engine can load; return its number.

        The trainer writes its newest version as a full folder meanwhile.
        """
        logger.warning("policy v%d cannot be loaded by any engine: waiting for a full version", version)
        await retry_io(f"policy version {version}", lambda: self.reader.close(version, self.holder))
        self.reader.give_up(version, source)
        async for _ in Polling(self.engines_timeout_s, POLL_S):
            newest = await retry_io("policy versions", self.reader.newest)
            if newest is not None and newest > self.version:
                return newest
        raise TimeoutWaitingError(
            f"no engine can load policy version {version}, and no full version followed within "
            f"{self.engines_timeout_s:.0f} s",
            hint="see logs/latest/trainer.log",
        )

    async def _wait_until_served(self, source: Source, version: int, report: UpdateReport) -> bool:
        """Wait until an engine serves ``version``; one is enough, failed ones restart and join by `_reconcile`.

        Return False if none can load it from ``source`` and the trainer was asked for a full version. Raises RoleError
        after ``engines_timeout_s`` without an engine.
        """
        deadline = time.monotonic() + self.engines_timeout_s
        while not report.is_served:
            # a restarted engine can still load a folder that other engines loaded, but not repeat a broadcast
            is_hopeless = not report.updated or not is_repeatable(source)
            if report.is_refused and is_hopeless and await self._request_full():
                return False
            if time.monotonic() >= deadline:
                reasons = "; ".join(report.failed.values()) or "no engine is available"
                raise RoleError(
                    f"no engine loaded policy version {version} within {self.engines_timeout_s:.0f} s ({reasons})",
                    hint="see logs/latest/inference/*.log",
                )
            await asyncio.sleep(POLL_S)
            report = await self.fleet.reconcile(source, version)
        if report.is_refused:
            await self._request_full()  # for the engines that failed
        for process, reason in report.failed.items():
            logger.warning("%s did not load policy v%d and will be restarted: %s", process, version, reason)
        return True

    async def _reconcile(self) -> None:
        """Bring restarted engines, which start at another version, to the live one."""
        is_old = time.monotonic() - self._leased_at > LEASE_REFRESH_S
        # a version that was broadcast has files only after a full version was requested
        if is_old and (is_repeatable(self._source) or await self._has(self.version)):
            self._source = await self._open(self.version)
        report = await self.fleet.reconcile(self._source, self.version)
        if report.is_refused and await self._request_full():
            self._leased_at = (
                0.0  # open it again at the next reconciliation: it may have a full folder by then
            )

    async def _open(self, version: int) -> Source:
        """Lease a version and return its source; the base model needs no lease."""
        self._leased_at, self._opened = time.monotonic(), version
        if version == 0 and self.base_model is not None:
            return self.base_model
        return await retry_io(f"policy version {version}", lambda: self.reader.open(version, self.holder))

    async def _has(self, version: int) -> bool:
        return await retry_io("policy versions", lambda: self.reader.has(version))

    async def _request_full(self) -> bool:
        return await retry_io("the request for a full version", self.reader.request_full)

    @asynccontextmanager
    async def _renewed_leases(self) -> AsyncIterator[None]:
        """Renew the leases in the block: loading may take longer than a lease lasts."""
        task = asyncio.create_task(self._renew())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_REFRESH_S)
            for version in {self.version, self._opened}:
                await asyncio.to_thread(self.reader.renew, version, self.holder)

    async def _wait_until_written(self, version: int) -> None:
        """Wait until the trainer has written ``version``.

        The trainer starts concurrently. It writes v0 of adapters, and the version from which a run resumes if no full
        folder of it exists.
        """
        async for _ in Polling(self.engines_timeout_s, POLL_S):
            if await self._has(version):
                return
        raise TimeoutWaitingError(
            f"the trainer did not write policy version {version} within {self.engines_timeout_s:.0f} s",
            hint="see logs/latest/trainer.log",
        )

    async def _mark_live(self, source: Source, version: int) -> None:
        await retry_io("the live version", lambda: write_json(self.run.live_version, {"version": version}))
        # set the version and start its evaluation without an await in between: a run that waits for its last version
        # must not end before that evaluation has started
        previous, self.version, self._source = self.version, version, source
        self.waiting_since = time.monotonic()
        self.on_live(version)
        if previous >= 0 and previous != version:
            await retry_io(f"policy version {previous}", lambda: self.reader.close(previous, self.holder))
