"""Rollouts continue while a check of files waits for a filesystem that does not respond."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from primerl_hpc.orchestrator import event_loop
from primerl_hpc.orchestrator.engines.fleet import Fleet
from primerl_hpc.orchestrator.event_loop import BackgroundCheck
from primerl_hpc.run import endpoints
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import PATIENCE_S


def test_the_caller_continues_while_a_check_is_late_and_gets_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_loop, "PATIENCE_S", 0.01)

    async def go() -> None:
        responds, started = asyncio.Event(), 0

        async def look() -> None:
            nonlocal started
            started += 1
            await responds.wait()
            raise OSError("stale file handle")

        check = BackgroundCheck(look, every_s=0.0, idle_s=0.0)
        for _ in range(3):
            await check.run_if_due()
        assert started == 1, "one check at a time"
        responds.set()
        with pytest.raises(OSError, match="stale"):
            await check.finish()
        with pytest.raises(OSError, match="stale"):
            await check.run_if_due()
        assert started == 2
        await check.finish()

    asyncio.run(go())


def test_a_check_in_time_is_complete_when_the_caller_continues() -> None:
    async def go() -> None:
        done = []

        async def look() -> None:
            await asyncio.to_thread(done.append, 1)

        check = BackgroundCheck(look, every_s=0.0, idle_s=0.0)
        await check.run_if_due()
        assert done == [1]

    asyncio.run(go())


def test_the_event_loop_of_the_orchestrator_runs_while_the_endpoints_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    publish_endpoint(run, "inference-0", "http://127.0.0.1:1")
    keys, responds, scandir = run_keys(run), threading.Event(), endpoints.os.scandir

    def wait_and_list(path: Path) -> object:
        assert responds.wait(PATIENCE_S)
        return scandir(path)

    monkeypatch.setattr(endpoints.os, "scandir", wait_and_list)

    async def go() -> None:
        fleet = Fleet(run, keys)
        asked = asyncio.create_task(fleet.versions())
        for _ in range(3):
            await asyncio.sleep(0.01)
        assert not asked.done()
        responds.set()
        assert await asked == {"inference-0": None}
        await fleet.close()

    asyncio.run(go())
