"""Turns on shared accelerators: real routes, fleet, watcher and files; vLLM's engine and the trainer are simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from primerl_hpc.common.files import write_json
from primerl_hpc.common.names import Role, process_name
from primerl_hpc.orchestrator.engines.turns import DeviceTurns, TurnHooks
from primerl_hpc.orchestrator.engines.weight_watcher import VersionHooks, WeightWatcher
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import STABLE
from primerl_hpc.transport.turns import Grant, TurnRequest, read_grant, write_grant, write_request
from primerl_hpc.transport.weights.filesystem import MANIFEST, FilesystemWeightReader
from tests.support.helpers import PATIENCE_S, wait_for_async
from tests.unit.orchestrator.test_fleet import Served, serving

TRAINER, ENGINE = process_name(Role.TRAINER, 0), process_name(Role.INFERENCE, 0)


def ask(run: RunDir, incarnation: int, number: int, *, is_released: bool = False) -> None:
    write_request(run, TRAINER, TurnRequest(1, incarnation, number, is_released))


def ask_as_engine(run: RunDir, incarnation: int) -> None:
    write_request(run, ENGINE, TurnRequest(1, incarnation))


def holds(run: RunDir, incarnation: int, number: int) -> bool:
    grant = read_grant(run)
    return grant is not None and grant.admits_trainer(TurnRequest(1, incarnation, number))


def admits(run: RunDir, incarnation: int) -> bool:
    grant = read_grant(run)
    return grant is not None and grant.admits_engine(ENGINE, TurnRequest(1, incarnation))


def in_a_run(
    tmp_path: Path, scene: Callable[[RunDir, DeviceTurns, Served], Awaitable[None]], *, level: int = 2
) -> None:
    """Play a scene with one published engine."""

    async def check() -> None:
        async with serving(tmp_path, ENGINE) as (run, fleet, (engine,)):
            engine.state.sleep_level = level
            turns = DeviceTurns(run, fleet, attempt=1, num_engines=1)

            async def main() -> None:
                await scene(run, turns, engine)

            await turns.run_with(main())

    asyncio.run(check())


async def first_turn(run: RunDir, turns: DeviceTurns, incarnation: int = 0) -> None:
    ask(run, incarnation, 1)
    await wait_for_async(lambda: holds(run, incarnation, 1))
    ask(run, incarnation, 1, is_released=True)
    await turns.opened.wait()


def test_the_trainer_has_the_first_turn_and_engines_start_after_it(tmp_path: Path) -> None:
    async def scene(run: RunDir, turns: DeviceTurns, engine: Served) -> None:
        ask_as_engine(run, 0)
        ask(run, 0, 1)
        await wait_for_async(lambda: holds(run, 0, 1))
        await asyncio.sleep(0.3)
        assert not turns.opened.is_set() and not admits(run, 0)
        assert not [call for call in engine.engine.calls if call[0] == "sleep"], "it was never admitted"
        ask(run, 0, 1, is_released=True)
        await wait_for_async(lambda: admits(run, 0))
        assert turns.opened.is_set() and not holds(run, 0, 1)

    in_a_run(tmp_path, scene)


def test_engines_sleep_before_a_turn_and_wake_with_the_new_version_after_it(tmp_path: Path) -> None:
    """The routes wake vLLM in this order: memory of the weights, the load, memory of the KV cache."""

    async def scene(run: RunDir, turns: DeviceTurns, engine: Served) -> None:
        watcher = watcher_of(run, turns)
        shown: list[str] = []

        async def wake() -> None:
            shown.append("wake")
            await watcher.wake()

        async def may() -> bool:
            return True

        turns.hooks = TurnHooks(may, lambda: shown.append("sleep"), wake)
        ask_as_engine(run, 0)
        await first_turn(run, turns)
        await wait_for_async(lambda: admits(run, 0))
        await watcher.load(0)
        engine.engine.calls.clear()
        shown.clear()
        ask(run, 0, 2)
        await wait_for_async(lambda: holds(run, 0, 2))
        assert engine.engine.calls == [("sleep", 2, "keep")] and engine.state.asleep and shown == ["sleep"]
        assert turns.exclusive.locked(), "no update reaches the engines during the turn"
        folder = publish(run, 1)
        ask(run, 0, 2, is_released=True)
        await wait_for_async(lambda: not engine.state.asleep)
        await wait_for_async(lambda: watcher.version == 1)
        loads = [(f"primerl_{name}", folder, 1) for name in ("prepare_update", "update_weights")]
        assert engine.engine.calls[1:] == [
            ("wake_up", ["weights"]),
            *loads,
            ("wake_up", ["kv_cache"]),
            ("resume",),
        ]
        assert (engine.state.paused, engine.state.version, shown) == (False, 1, ["sleep", "wake"])
        assert turns.take_metrics().keys() == {"time/hand_over"} and not turns.take_metrics()

    in_a_run(tmp_path, scene)


def test_a_turn_without_a_new_version_wakes_the_engines_with_the_live_one(tmp_path: Path) -> None:
    async def scene(run: RunDir, turns: DeviceTurns, engine: Served) -> None:
        watcher = watcher_of(run, turns)
        turns.hooks = TurnHooks(wake=watcher.wake)
        ask_as_engine(run, 0)
        await first_turn(run, turns)
        await wait_for_async(lambda: admits(run, 0))
        await watcher.load(0)
        ask(run, 0, 2)
        await wait_for_async(lambda: holds(run, 0, 2))
        ask(run, 0, 2, is_released=True)
        await wait_for_async(lambda: not engine.state.asleep)
        assert ("primerl_update_weights", "base", 0) in engine.engine.calls and watcher.version == 0

    in_a_run(tmp_path, scene)


def test_an_engine_that_exits_while_it_sleeps_starts_after_the_turn(tmp_path: Path) -> None:
    async def scene(run: RunDir, turns: DeviceTurns, engine: Served) -> None:
        ask_as_engine(run, 0)
        await first_turn(run, turns)
        await wait_for_async(lambda: admits(run, 0))
        ask(run, 0, 2)
        await wait_for_async(lambda: holds(run, 0, 2))
        run.endpoint(ENGINE).unlink()
        ask_as_engine(run, 1)
        await asyncio.sleep(0.3)
        assert not admits(run, 1) and holds(run, 0, 2)
        ask(run, 0, 2, is_released=True)
        await wait_for_async(lambda: admits(run, 1))

    in_a_run(tmp_path, scene)


@pytest.mark.parametrize("sign", ["successor", "supervisor"])
def test_a_turn_does_not_wait_for_an_engine_that_exited(tmp_path: Path, sign: str) -> None:
    async def scene(run: RunDir, turns: DeviceTurns, engine: Served) -> None:
        ask_as_engine(run, 0)
        await first_turn(run, turns)
        await wait_for_async(lambda: admits(run, 0))
        run.endpoint(
            ENGINE
        ).unlink()  # it was killed; its memory may be in use until the supervisor has ended it
        ask(run, 0, 2)
        await asyncio.sleep(0.3)
        assert not holds(run, 0, 2)
        if sign == "successor":
            ask_as_engine(run, 1)
        else:
            write_json(run.state, {"processes": {ENGINE: {"state": "exited", "incarnation": 0}}})
        await wait_for_async(lambda: holds(run, 0, 2))
        assert not admits(run, 1)

    in_a_run(tmp_path, scene)


def test_a_restarted_engine_sleeps_although_the_end_of_its_predecessor_is_the_last_record(
    tmp_path: Path,
) -> None:
    async def scene(run: RunDir, turns: DeviceTurns, engine: Served) -> None:
        write_json(run.state, {"processes": {ENGINE: {"state": "exited", "incarnation": 0}}})
        ask_as_engine(run, 1)
        publish_endpoint(run, ENGINE, engine.url, incarnation=1)
        await first_turn(run, turns)
        await wait_for_async(lambda: admits(run, 1))
        ask(run, 0, 2)
        await wait_for_async(lambda: holds(run, 0, 2))
        assert engine.state.asleep

    in_a_run(tmp_path, scene)


def test_a_turn_waits_for_an_engine_that_still_starts(tmp_path: Path) -> None:
    async def scene(run: RunDir, turns: DeviceTurns, engine: Served) -> None:
        run.endpoint(ENGINE).unlink()
        ask_as_engine(run, 0)
        await first_turn(run, turns)
        await wait_for_async(lambda: admits(run, 0))
        ask(run, 0, 2)
        await asyncio.sleep(0.3)
        assert not holds(run, 0, 2)
        publish_endpoint(run, ENGINE, engine.url)
        await wait_for_async(lambda: holds(run, 0, 2))
        assert engine.state.asleep

    in_a_run(tmp_path, scene)


def test_a_restarted_orchestrator_puts_engines_to_sleep_before_the_new_trainer_builds(tmp_path: Path) -> None:
    """Trainer and orchestrator restart together; the grant lists which engines may be awake."""

    async def scene(run: RunDir, turns: DeviceTurns, engine: Served) -> None:
        await first_turn(run, turns, incarnation=1)
        assert engine.state.asleep and engine.engine.calls == [("sleep", 2, "keep")]

    RunDir(tmp_path).turn_grant.parent.mkdir(parents=True)
    write_grant(RunDir(tmp_path), Grant(1, None, {ENGINE: 0}))
    in_a_run(tmp_path, scene)


def test_grants_of_an_earlier_attempt_do_not_count(tmp_path: Path) -> None:
    async def scene(run: RunDir, turns: DeviceTurns, engine: Served) -> None:
        await first_turn(run, turns)
        assert not engine.state.asleep, "an engine of this attempt was not admitted yet"

    write_grant(RunDir(tmp_path), Grant(0, None, {ENGINE: 0}))
    in_a_run(tmp_path, scene)


def test_a_turn_waits_until_the_loop_allows_it(tmp_path: Path) -> None:
    async def scene(run: RunDir, turns: DeviceTurns, engine: Served) -> None:
        is_evaluating = True

        async def may() -> bool:
            return not is_evaluating

        await first_turn(run, turns)
        turns.hooks = TurnHooks(may)
        ask(run, 0, 2)
        await asyncio.sleep(0.3)
        assert not holds(run, 0, 2)
        is_evaluating = False
        await wait_for_async(lambda: holds(run, 0, 2))

    in_a_run(tmp_path, scene)


def test_the_end_of_a_trainer_ends_its_turn(tmp_path: Path) -> None:
    async def scene(run: RunDir, turns: DeviceTurns, engine: Served) -> None:
        await first_turn(run, turns)
        ask(run, 0, 2)
        await wait_for_async(lambda: holds(run, 0, 2))
        ask(run, 1, 1)  # its successor
        await wait_for_async(lambda: holds(run, 1, 1))

    in_a_run(tmp_path, scene)


@pytest.mark.parametrize("level", [1, 2])
def test_the_routes_of_sleep_require_the_key_and_keep_a_sleeping_engine_paused(
    tmp_path: Path, level: int
) -> None:
    async def scene(run: RunDir, turns: DeviceTurns, engine: Served) -> None:
        headers = {"Authorization": f"Bearer {engine.state.api_key}"}
        async with httpx.AsyncClient(base_url=engine.url) as client:
            for route in ("/sleep", "/wake_up"):
                assert (await client.post(route)).status_code == 401
            assert (await client.post("/sleep", headers=headers)).json() == {"asleep": True}
            await client.post("/sleep", headers=headers)
            assert engine.engine.calls == [("sleep", engine.state.sleep_level, "keep")]
            for route in ("/pause", "/resume"):
                assert (await client.post(route, headers=headers)).json() == {"paused": True}
            assert len(engine.engine.calls) == 1, "a sleeping engine is not resumed with missing weights"
            state = (await client.get("/primerl/state", headers=headers)).json()
            assert state["asleep"] and state["paused"]
            answer = await client.post("/wake_up", headers=headers)
            if engine.state.sleep_level == 2:
                assert answer.status_code == 409 and "/update_weights" in answer.json()["error"]
                assert engine.state.asleep
            else:
                assert answer.json() == {"asleep": False} and engine.engine.calls[-1] == ("wake_up", None)
                assert not engine.state.paused

    in_a_run(tmp_path, scene, level=level)


def test_an_engine_that_refuses_a_version_sleeps_again(tmp_path: Path) -> None:
    async def scene(run: RunDir, turns: DeviceTurns, engine: Served) -> None:
        engine.engine.bad["/w/bad"] = "refuse"
        (member,) = turns.fleet.members().values()
        await turns.fleet.client.sleep(member)
        report = await turns.fleet.update("/w/bad", 3)
        assert report.is_refused and engine.state.asleep and engine.state.version == 0
        assert engine.engine.calls[-1] == ("sleep", 2, "keep")

    in_a_run(tmp_path, scene)


def watcher_of(run: RunDir, turns: DeviceTurns) -> WeightWatcher:
    hooks = VersionHooks(lambda live, newest: newest, _note, _note, exclusive=turns.exclusive)
    reader: Any = FilesystemWeightReader(run)
    return WeightWatcher(run, turns.fleet, reader, hooks, base_model="base", engines_timeout_s=PATIENCE_S)


def _note(version: int) -> None:
    """Nothing reacts."""


def publish(run: RunDir, version: int) -> str:
    folder = run.weights_step(version)
    folder.mkdir(parents=True)
    write_json(folder / MANIFEST, {"files": []})
    (folder / STABLE).write_text("")
    return str(folder)
