"""Looks for new policy versions and brings the engines to them: pending → engines updated → live.

    watcher = WeightWatcher(run, fleet, reader, base_model=…, next_version=…, on_pending=…, on_live=…)
    await watcher.load(version)        # at start: the engines serve what the run resumes from
    await watcher.watch()              # for ever
    await watcher.hold()               # for ever, without looking for new versions

The live version is leased, so that restarted engines can still be brought to it, until the next one is live; so is the
next one, for as long as engines load it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from primerl_hpc.common.errors import DataError, RoleError, TimeoutWaitingError
from primerl_hpc.common.files import write_json
from primerl_hpc.common.leases import LEASE_REFRESH_S
from primerl_hpc.common.patience import Patience, outlast
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.orchestrator.fleet import Fleet, UpdateReport
from primerl_hpc.transport.weights import Announcement, Source, WeightReader

logger = logging.getLogger(__name__)

POLL_S = 0.2
RECONCILE_S = 2.0
READER = "orchestrator"


class WeightWatcher:
    def __init__(
        self,
        run: RunDir,
        fleet: Fleet,
        reader: WeightReader,
        *,
        base_model: str | None,
        engines_timeout_s: float,
        next_version: Callable[[int, int], int],
        on_pending: Callable[[int], None],
        on_live: Callable[[int], None],
        may_update: Callable[[], bool] = lambda: True,
        holder: str = READER,
    ) -> None:
        """``next_version(live, newest)``: which of the versions in (live, newest] to load; none while not ``may_update()``.

        ``base_model``: what v0 is; None where v0 is a version that the trainer writes, as all others: adapters.

        ``engines_timeout_s``: without a single engine for this long, give up. ``holder``: whose name its leases bear.
        """
        self.run, self.fleet, self.reader, self.base_model = run, fleet, reader, base_model
        self.engines_timeout_s = engines_timeout_s
        self.next_version, self.may_update = next_version, may_update
        self.on_pending, self.on_live = on_pending, on_live
        self.holder, self.version = holder, -1
        self.waiting_since = time.monotonic()  # for the version after the live one
        self.update_seconds: list[float] = []
        self.paused_seconds: list[float] = []  # of them, from the engines' pause to their resumption
        self._leased_at = 0.0
        self._opened = -1  # the version that was opened last
        self._source: Source = base_model or ""

    async def load(self, version: int) -> None:
        """Bring all engines to ``version``, which is live then. Raises RoleError when no engine takes it."""
        async with self._renewing():
            await self._load(version)

    async def load_again(self, version: int) -> None:
        """`load` of an earlier version. Raises DataError or FileNotFoundError when it is not there any more."""
        is_base = version == 0 and self.base_model is not None
        if not is_base and not await self._has(version):
            raise DataError(f"there are no weights of policy version {version}")
        await self.load(version)

    async def _load(self, version: int) -> None:
        if self.base_model is None:
            await self._until_written(version)
        source = await self._open(version)
        while not await self._is_served(source, version, await self.fleet.reconcile(source, version)):
            self.reader.give_up(version, source)
            await self._until_written(version)
            source = await self._open(version)
        await self._live(source, version)

    async def watch(self) -> None:
        next_reconcile = time.monotonic() + RECONCILE_S
        patience = Patience("policy versions")
        while True:
            newest, may_update = None, self.may_update()  # asked first: what is newest then is loaded
            with patience:
                newest = await asyncio.to_thread(self.reader.newest)
            if not may_update:
                self.waiting_since = time.monotonic()
            if may_update and newest is not None and newest > self.version:
                async with self._renewing():
                    await self._update(newest)
            elif time.monotonic() >= next_reconcile:
                await self._reconcile()
                next_reconcile = time.monotonic() + RECONCILE_S
            await asyncio.sleep(POLL_S)

    async def hold(self) -> None:
        """Bring engines that were restarted to the live version, which stays the same."""
        while True:
            await asyncio.sleep(RECONCILE_S)
            await self._reconcile()

    def release(self) -> None:
        """Give the lease back: nobody will be brought to this version any more."""
        if self.version >= 0:
            self.reader.close(self.version, self.holder)

    def take_metrics(self) -> dict[str, float]:
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
            version = newest  # the one in between was not kept
        self.on_pending(version)
        start, paused_s = time.monotonic(), 0.0
        while True:
            source = await self._open(version)
            report = await self.fleet.update(source, version)
            paused_s += report.seconds
            if await self._is_served(source, version, report):
                break
            version = await self._instead_of(version, source)
        self.update_seconds.append(time.monotonic() - start)
        self.paused_seconds.append(paused_s)
        logger.info("policy v%d is live (%.2f s)", version, self.update_seconds[-1])
        await self._live(source, version)

    async def _instead_of(self, version: int, source: Source) -> int:
        """No engine can follow the links to ``version``; the trainer writes its newest one whole meanwhile."""
        logger.warning("policy v%d cannot be loaded: waiting for a whole version", version)
        await outlast(f"policy version {version}", lambda: self.reader.close(version, self.holder))
        self.reader.give_up(version, source)
        deadline = time.monotonic() + self.engines_timeout_s
        while ((newest := await outlast("policy versions", self.reader.newest)) or 0) <= self.version:
            if time.monotonic() >= deadline:
                raise TimeoutWaitingError(
                    f"policy version {version} is broken, and no whole one came within {self.engines_timeout_s:.0f} s",
                    mend="see logs/latest/trainer.log",
                )
            await asyncio.sleep(POLL_S)
        return newest

    async def _is_served(self, source: Source, version: int, report: UpdateReport) -> bool:
        """One engine is enough to go on; those that failed are being restarted and join by `_reconcile`.

        False when none can come to ``version`` from ``source``, and the trainer was asked for a whole version. Raises
        RoleError when none does.
        """
        deadline = time.monotonic() + self.engines_timeout_s
        while not report.is_served:
            # from a folder that others took, a restarted engine can still come; what was sent is gone
            is_hopeless = not report.updated or isinstance(source, Announcement)
            if report.is_refused and is_hopeless and await self._ask_for_whole():
                return False
            if time.monotonic() >= deadline:
                faults = "; ".join(report.failed.values()) or "none is there"
                raise RoleError(
                    f"no engine took policy version {version} within {self.engines_timeout_s:.0f} s ({faults})",
                    mend="see logs/latest/inference/*.log",
                )
            await asyncio.sleep(POLL_S)
            report = await self.fleet.reconcile(source, version)
        if report.is_refused:
            await self._ask_for_whole()  # for those that are left behind
        for process, fault in report.failed.items():
            logger.warning(
                "%s is left behind at policy v%d and will be restarted: %s", process, version, fault
            )
        return True

    async def _reconcile(self) -> None:
        """Engines that were restarted meanwhile start at some version of their own: bring them to the live one."""
        is_old = time.monotonic() - self._leased_at > LEASE_REFRESH_S
        # what was sent may be nowhere but in engines, until somebody asks for it
        is_there = not isinstance(self._source, Announcement) or await self._has(self.version)
        if is_old and is_there:
            self._source = await self._open(self.version)
        report = await self.fleet.reconcile(self._source, self.version)
        if report.is_refused and await self._ask_for_whole():
            self._leased_at = 0.0  # look again: it may be there whole by then

    async def _open(self, version: int) -> Source:
        """Where a version comes from, leased; the base model is what nobody deletes."""
        self._leased_at, self._opened = time.monotonic(), version
        if version == 0 and self.base_model is not None:
            return self.base_model
        return await outlast(f"policy version {version}", lambda: self.reader.open(version, self.holder))

    async def _has(self, version: int) -> bool:
        return await outlast("policy versions", lambda: self.reader.has(version))

    async def _ask_for_whole(self) -> bool:
        return await outlast("what the trainer is asked", self.reader.ask_for_whole)

    @asynccontextmanager
    async def _renewing(self) -> AsyncIterator[None]:
        """Engines may load for longer than a lease lasts."""
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

    async def _until_written(self, version: int) -> None:
        """The trainer starts beside us, and writes v0 of adapters, and what a resumed run begins with, if it is not there whole."""
        deadline = time.monotonic() + self.engines_timeout_s
        while not await self._has(version):
            if time.monotonic() >= deadline:
                raise TimeoutWaitingError(
                    f"waited {self.engines_timeout_s:.0f} s for the trainer to write policy version {version}",
                    mend="see logs/latest/trainer.log",
                )
            await asyncio.sleep(POLL_S)

    async def _live(self, source: Source, version: int) -> None:
        await outlast("the live version", lambda: write_json(self.run.live_version, {"version": version}))
        # nobody sees the version before what follows from it is begun: its evaluation may be what a run still has to do
        previous, self.version, self._source = self.version, version, source
        self.waiting_since = time.monotonic()
        self.on_live(version)
        if previous >= 0 and previous != version:
            await outlast(f"policy version {previous}", lambda: self.reader.close(previous, self.holder))
