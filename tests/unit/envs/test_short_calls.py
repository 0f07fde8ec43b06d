"""Calls of verifiers that run in the event loop while they are short, and on a thread otherwise."""

from __future__ import annotations

import asyncio
import threading

import pytest
from verifiers.v1.clients.train import RendererSlot
from verifiers.v1.runtimes import subprocess as runtimes

from primerl_hpc.envs.serving import short_calls
from primerl_hpc.envs.serving.short_calls import SHORT_S, inline_slot, inline_teardown


def test_a_renderer_runs_in_the_event_loop_until_a_call_is_long(monkeypatch):
    slot = inline_slot(RendererSlot)(renderer=None)
    now = 0.0
    monkeypatch.setattr(short_calls.time, "perf_counter", lambda: now)

    def long() -> int:
        nonlocal now
        now += 2 * SHORT_S
        return threading.get_ident()

    async def threads() -> list[bool]:
        here = threading.get_ident()
        return [
            await slot.run(call) == here for call in (threading.get_ident, long, long, threading.get_ident)
        ] + [
            await slot.run(threading.get_ident) == here  # the call before was short again
        ]

    assert asyncio.run(threads()) == [True, True, False, False, True]


def test_a_renderer_in_use_by_a_thread_does_not_block_the_event_loop():
    slot = inline_slot(RendererSlot)(renderer=None)

    async def release_and_wait() -> bool:
        slot.lock.acquire()
        waiting = asyncio.ensure_future(slot.run(threading.get_ident))
        await asyncio.sleep(0)  # would never return if the event loop waited for the lock
        slot.lock.release()
        return await waiting == threading.get_ident()

    assert asyncio.run(release_and_wait()) is False


def test_an_error_of_a_renderer_releases_it():
    slot = inline_slot(RendererSlot)(renderer=None)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(slot.run(lambda: 1 // 0))
    assert not slot.lock.locked()


@pytest.mark.parametrize("files", [[], ["result.txt"], None], ids=["empty", "files", "removed"])
def test_a_working_folder_is_removed_whatever_it_contains(tmp_path, monkeypatch, files):
    monkeypatch.setattr(runtimes, "CACHE_DIR", tmp_path)
    monkeypatch.setattr(
        runtimes.SubprocessRuntime, "teardown", inline_teardown(runtimes.SubprocessRuntime.teardown)
    )

    async def run() -> None:
        runtime = runtimes.SubprocessRuntime(runtimes.SubprocessConfig(), name="trace")
        await runtime.start()
        if files is None:
            runtime.workdir.rmdir()
        for name in files or ():
            await runtime.write(name, b"1")
        await runtime.stop()
        assert not runtime.workdir.exists()

    asyncio.run(run())
