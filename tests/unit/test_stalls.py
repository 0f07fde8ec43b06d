"""How long silence may last, who is to blame for it, and what counts as an answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.common.names import Kind
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.runtime.guard import descendants_of, handles
from primerl_hpc.runtime.watchdog import PAUSES, HealthWatch, StallClock, is_answering, suspect
from tests.support import ROOT, wait_for


def test_silence_is_a_stall_after_the_limit_and_not_before() -> None:
    clock = StallClock(100.0, since=0.0)
    assert clock.look(100.0, 0, is_due=True) is None
    assert clock.look(101.0, 0, is_due=True) == 101.0


def test_nothing_is_due_while_something_starts() -> None:
    clock = StallClock(100.0, since=0.0)
    assert clock.look(5000.0, 0, is_due=False) is None
    assert clock.look(5099.0, 0, is_due=True) is None and clock.look(5101.0, 0, is_due=True)


def test_a_run_of_long_steps_may_be_silent_for_longer() -> None:
    clock = StallClock(100.0, since=0.0)
    for number, now in enumerate((10.0, 70.0, 130.0), start=1):  # the first is the start, not a step
        assert clock.look(now, number, is_due=True) is None
    assert clock.look(130.0 + PAUSES * 60.0, 3, is_due=True) is None
    assert clock.look(131.0 + PAUSES * 60.0, 3, is_due=True)


@given(st.lists(st.floats(0, 99), max_size=30))
def test_a_run_that_moves_within_the_limit_never_stalls(pauses: list[float]) -> None:
    clock, now = StallClock(100.0, since=0.0), 0.0
    for number, pause in enumerate(pauses, start=1):
        now += pause
        assert clock.look(now, number - 1, is_due=True) is None
        assert clock.look(now, number, is_due=True) is None


@pytest.mark.parametrize(
    "kind, batch, step, name",
    [
        (Kind.RL, 3, 2, "trainer-0"),  # it has a batch and does not finish it
        (Kind.RL, 3, 3, "orchestrator-0"),
        (Kind.RL, 0, 0, "orchestrator-0"),
        (Kind.SFT, 0, 7, "sft-0"),
    ],
)
def test_who_holds_a_silent_run_up(kind: Kind, batch: int, step: int, name: str) -> None:
    assert suspect(kind, batch, step) == name


def test_a_server_that_takes_a_connection_and_says_nothing_does_not_answer() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert not asyncio.run(is_answering(url, 0.5))
    assert asyncio.run(is_answering(url, 0.5))  # refused: it is gone, and known to be


@pytest.fixture
def full_server() -> Iterator[str]:
    """The URL of a server that takes no connection any more: those that nobody accepted fill its queue."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_server_whose_queue_of_connections_is_full_does_not_answer(full_server: str) -> None:
    assert not asyncio.run(is_answering(full_server, 0.5))


def test_a_host_that_is_silent_as_a_whole_is_left_to_the_scheduler(
    full_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(_host: str, _port: int) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(asyncio, "open_connection", connect)
    assert asyncio.run(is_answering(full_server, 0.2))


def test_a_server_that_was_late_once_does_not_hang(tmp_path: Path) -> None:
    watch = HealthWatch(RunDir(tmp_path), ["inference-0"], limit_s=10.0)

    def is_hung_after(asked_at: float, given_up_at: float, url: str = "http://n0:1") -> bool:
        watch.note_silence("inference-0", url, asked_at, given_up_at)
        return watch.is_hung("inference-0")

    assert not is_hung_after(0.0, 5.0)
    assert not is_hung_after(7.5, 10.0)
    assert is_hung_after(12.5, 17.5)
    assert not is_hung_after(20.0, 25.0, "http://n0:2")  # its successor
    watch.forget("inference-0")
    assert not is_hung_after(100.0, 105.0)


DUMPS = """
import subprocess, sys, time
from primerl_hpc.common.log import dump_stacks_on_signal
deaf = subprocess.Popen(["sleep", "600"])
dump_stacks_on_signal()
def hang_here(): time.sleep(600)
hang_here()
"""


def test_the_guard_asks_only_those_for_stacks_that_can_give_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        guard = subprocess.Popen(
            [sys.executable, "-m", "primerl_hpc.runtime.guard", "--", sys.executable, "-c", DUMPS],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=file,
        )
    try:
        wait_for(
            lambda: [handles(pid, signal.SIGUSR2) for pid in descendants_of(guard.pid)] == [True, False],
            "program and its child",
        )
        guard.send_signal(signal.SIGUSR2)
        wait_for(lambda: "in hang_here" in log.read_text(), "its stacks")
        assert len(descendants_of(guard.pid)) == 2
    finally:
        guard.terminate()
        guard.wait(timeout=30)
