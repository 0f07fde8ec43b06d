"""The watcher of policy versions when engines cannot load one. Real routes and fleet, simulated vLLM."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import read_json
from primerl_hpc.orchestrator.engines.fleet import Fleet
from primerl_hpc.orchestrator.engines.weight_watcher import VersionHooks, WeightWatcher
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.leases import lease_path
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.weights.broadcast import BroadcastWeightReader, publish_offer
from primerl_hpc.transport.weights.delta import DeltaWeightReader
from primerl_hpc.transport.weights.sources import BroadcastOffer, WeightReader
from tests.support.helpers import PATIENCE_S, wait_for_async
from tests.unit.orchestrator.test_fleet import serving
from tests.unit.transport.test_weights_delta import write_full, write_link


def watch(
    run: RunDir,
    fleet: Fleet,
    live: list[int],
    reader: Callable[[RunDir], WeightReader] = DeltaWeightReader,
    may_update: Callable[[], bool] = lambda: True,
) -> WeightWatcher:
    return WeightWatcher(
        run,
        fleet,
        reader(run),
        VersionHooks(
            next_version=lambda _, newest: newest,
            on_pending=lambda version: None,
            on_live=live.append,
            may_update=may_update,
        ),
        base_model="/base",
        engines_timeout_s=PATIENCE_S,
    )


def test_a_broken_link_is_followed_by_a_full_version_and_the_old_policy_serves_until_then(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        async with serving(tmp_path, "inference-0", "inference-1") as (run, fleet, engines):
            live: list[int] = []
            watcher = watch(run, fleet, live)
            await watcher.load(0)
            task = asyncio.create_task(watcher.watch())
            write_full(run, 1)
            await wait_for_async(lambda: live == [0, 1])
            for engine in engines:
                engine.engine.bad[str(run.weights_step(1))] = "refuse"
            write_link(run, 2)
            await wait_for_async(run.full_weights_request.exists)
            assert live == [0, 1] and set((await fleet.versions()).values()) == {1}
            assert not any(run.restart_request(engine.process).exists() for engine in engines)
            write_link(run, 3)  # of a version that no engine has: there is no chain to it
            write_full(run, 4)
            await wait_for_async(lambda: live[-1] == 4)
            assert live == [0, 1, 4] and set((await fleet.versions()).values()) == {4}
            assert run.has_lease(run.weights_step(4))
            # released after on_live: the old version is protected until the run uses the new one
            await wait_for_async(lambda: not run.has_lease(run.weights_step(1)))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(check())


def test_a_late_engine_that_cannot_follow_the_links_loads_the_same_version_written_in_full(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        async with serving(tmp_path, "inference-0") as (run, fleet, engines):
            write_full(run, 1)
            write_link(run, 2)
            live: list[int] = []
            watcher = watch(run, fleet, live)
            await watcher.load(2)
            task = asyncio.create_task(watcher.hold())
            engines[0].state.version = 1  # a restarted one
            engines[0].engine.bad[str(run.weights_step(1))] = "refuse"
            await wait_for_async(run.full_weights_request.exists)
            write_full(run, 2)
            await wait_for_async(lambda: engines[0].state.version == 2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(check())


def test_held_back_updates_cause_no_timeout_and_then_the_newest_version_is_loaded(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path, "inference-0") as (run, fleet, _):
            live: list[int] = []
            is_held = [True]
            watcher = watch(run, fleet, live, may_update=lambda: not is_held[0])
            await watcher.load(0)
            task = asyncio.create_task(watcher.watch())
            write_full(run, 1)
            for _ in range(3):
                before = watcher.waiting_since
                await wait_for_async(lambda: watcher.waiting_since > before)  # noqa: B023
            assert live == [0] and set((await fleet.versions()).values()) == {0}
            write_full(run, 2)
            is_held[0] = False
            await wait_for_async(lambda: live == [0, 2])
            assert set((await fleet.versions()).values()) == {2}
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(check())


def test_a_version_stays_leased_while_engines_load_it_for_longer_than_a_lease(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("primerl_hpc.orchestrator.engines.weight_watcher.LEASE_REFRESH_S", 0.02)

    async def check() -> None:
        async with serving(tmp_path, "inference-0") as (run, fleet, engines):
            watcher = watch(run, fleet, live := [])
            await watcher.load(0)
            loads, may_end = [], asyncio.Event()
            plain = engines[0].engine.collective_rpc

            async def slow(method: str, args: tuple) -> list:
                loads.append(args[0]["version"])
                await may_end.wait()
                return await plain(method, args)

            engines[0].engine.collective_rpc = slow
            task = asyncio.create_task(watcher.watch())
            write_full(run, 1)
            await wait_for_async(lambda: loads)
            (lease,) = run.weights.glob(".leases/step_1.*")
            os.utime(lease, (0, 0))
            try:
                await wait_for_async(lambda: lease.stat().st_mtime > 0)
            finally:
                may_end.set()
            await wait_for_async(lambda: live == [0, 1])
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(check())


@pytest.mark.parametrize("fault", ["cannot be paused", "is away"])
def test_a_broadcast_that_only_a_prefill_engine_received_is_requested_as_a_folder(
    tmp_path: Path, fault: str
) -> None:
    async def check() -> None:
        async with serving(tmp_path, "inference-0", "prefill-0") as (run, fleet, engines):
            live: list[int] = []
            watcher = watch(run, fleet, live, BroadcastWeightReader)
            await watcher.load(0)
            plain, pauses = engines[0].engine.pause_generation, []

            async def fail_once(**how: object) -> None:
                pauses.append(how)
                if len(pauses) == 1:
                    raise RuntimeError("no")
                await plain(**how)

            if fault == "is away":
                run.endpoint("inference-0").unlink()
            else:
                engines[0].engine.pause_generation = fail_once
            publish_offer(run, BroadcastOffer(1, "127.0.0.1", 5, "a"), is_open=True)
            task = asyncio.create_task(watcher.watch())
            await wait_for_async(lambda: engines[1].state.version == 1)
            publish_endpoint(run, "inference-0", engines[0].url)
            await wait_for_async(run.full_weights_request.exists)
            publish_offer(run, BroadcastOffer(1, "127.0.0.1", 5, "a"), is_open=False)
            write_full(run, 1)
            await wait_for_async(lambda: live == [0, 1])
            assert await fleet.versions() == {"inference-0": 1, "prefill-0": 1}
            told = watcher.take_metrics()
            assert 0 < told["time/engines_paused"] <= told["time/weight_update"]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(check())


def test_a_version_that_is_announced_and_whose_folder_every_engine_refuses_ends_the_run(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        async with serving(tmp_path, "inference-0", attempts=1) as (run, fleet, engines):
            watcher = watch(run, fleet, [], BroadcastWeightReader)
            await watcher.load(0)
            engines[0].engine.bad[str(run.weights_step(1))] = "refuse"
            write_full(run, 1)
            publish_offer(run, BroadcastOffer(1, "127.0.0.1", 5, "a"), is_open=True)
            with pytest.raises(DataError, match="no engine can load policy version 1"):
                await asyncio.wait_for(watcher.watch(), PATIENCE_S)

    asyncio.run(check())


@pytest.mark.parametrize("what", ["lease", "live version"])
def test_a_version_becomes_live_despite_transient_errors_of_the_run_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    async def check() -> None:
        async with serving(tmp_path, "inference-0") as (run, fleet, _):
            live: list[int] = []
            watcher = watch(run, fleet, live)
            await watcher.load(0)
            lease = lease_path(run.weights_step(1), watcher.holder)
            in_the_way = {"lease": lease, "live version": run.live_version}[what]
            in_the_way.unlink(missing_ok=True)
            in_the_way.mkdir(parents=True)
            write_full(run, 1)
            task = asyncio.create_task(watcher.watch())
            await wait_for_async(lambda: "retrying" in caplog.text)
            assert live == [0] and watcher.version == 0 and not task.done()
            in_the_way.rmdir()
            await wait_for_async(lambda: live == [0, 1])
            assert read_json(run.live_version) == {"version": 1} and lease.exists()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(check())
