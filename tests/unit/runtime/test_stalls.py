"""How long a run may make no progress, which process is at fault, and what counts as a response."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.common.files import append_line
from primerl_hpc.common.names import Kind, Role
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime import step_history
from primerl_hpc.runtime.steps.guard import descendants_of, has_handler
from primerl_hpc.runtime.watchdog import PAUSES, HealthWatch, StallClock, is_answering, suspect
from tests.support.helpers import PATIENCE_S, ROOT, TOY_RECIPE, make_plan, process_plan, wait_for


def test_silence_is_a_stall_after_the_limit_and_not_before() -> None:
    clock = StallClock(100.0, since=0.0)
    assert clock.seconds_stalled(100.0, 0, is_due=True) is None
    assert clock.seconds_stalled(101.0, 0, is_due=True) == 101.0


def test_nothing_is_due_while_something_starts() -> None:
    clock = StallClock(100.0, since=0.0)
    assert clock.seconds_stalled(5000.0, 0, is_due=False) is None
    assert clock.seconds_stalled(5099.0, 0, is_due=True) is None and clock.seconds_stalled(
        5101.0, 0, is_due=True
    )


def test_a_run_with_long_steps_may_make_no_progress_for_longer() -> None:
    clock = StallClock(100.0, since=0.0)
    for number, now in enumerate((10.0, 70.0, 130.0), start=1):  # the first is the start, not a step
        assert clock.seconds_stalled(now, number, is_due=True) is None
    assert clock.seconds_stalled(130.0 + PAUSES * 60.0, 3, is_due=True) is None
    assert clock.seconds_stalled(131.0 + PAUSES * 60.0, 3, is_due=True)


@given(st.lists(st.floats(0, 99), max_size=30))
def test_a_run_that_moves_within_the_limit_never_stalls(pauses: list[float]) -> None:
    clock, now = StallClock(100.0, since=0.0), 0.0
    for number, pause in enumerate(pauses, start=1):
        now += pause
        assert clock.seconds_stalled(now, number - 1, is_due=True) is None
        assert clock.seconds_stalled(now, number, is_due=True) is None


@pytest.mark.parametrize(
    "kind, batch, step, name",
    [
        (Kind.RL, 3, 2, "trainer-0"),  # it has a batch and does not finish it
        (Kind.RL, 3, 3, "orchestrator-0"),
        (Kind.RL, 0, 0, "orchestrator-0"),
        (Kind.SFT, 0, 7, "sft-0"),
    ],
)
def test_the_process_that_stalls_a_run_is_named(kind: Kind, batch: int, step: int, name: str) -> None:
    assert suspect(kind, batch, step) == name


def test_sizes_of_files_are_read_rarely_while_no_step_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looks = 100.0, Counter[str]()
    stat = os.stat

    def counting(path: Path, **options: bool) -> os.stat_result:
        looks["stat"] += 1
        return stat(path, **options)

    monkeypatch.setattr(step_history.time, "monotonic", lambda: now)
    monkeypatch.setattr(step_history.os, "stat", counting)
    plan = make_plan(tmp_path, TOY_RECIPE, processes=[process_plan(Role.TRAINER)])
    run = RunDir(tmp_path)
    watch = step_history.ProgressWatch(run, plan.phases[0])
    for _ in range(60):
        now += 1.0
        assert watch.steps() == watch.activity() == 0
    looks.clear()
    for _ in range(60):
        now += 1.0
        assert watch.steps() == watch.activity() == 0
    assert 0 < looks["stat"] <= 60, "less than one operation a second while nothing changes"
    append_line(run.metrics("trainer"), "{}")
    append_line(run.phase("main").traces("train"), "{}")
    now += step_history.IDLE_S
    assert (watch.steps(), watch.activity()) == (3, 6)
    append_line(run.metrics("trainer"), "{}")
    now += step_history.BUSY_S
    assert watch.steps() == 6, "the next change is noticed at once"


def test_a_server_that_accepts_a_connection_without_a_response_does_not_answer() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert not asyncio.run(is_answering(url, 0.5))
    assert asyncio.run(is_answering(url, 0.5))  # refused: it has ended, and is known to have


@pytest.fixture
def full_server() -> Iterator[str]:
    """Return the URL of a server that accepts no more connections: its queue of them is full."""
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


def test_a_host_without_any_response_is_left_to_the_scheduler(
    full_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(_host: str, _port: int, **_: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(asyncio, "open_connection", connect)
    assert asyncio.run(is_answering(full_server, 0.2))


def test_a_server_that_was_late_once_does_not_hang() -> None:
    watch = HealthWatch(dict, limit_s=10.0)

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
            [sys.executable, "-m", "primerl_hpc.runtime.steps.guard", "--", sys.executable, "-c", DUMPS],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=file,
        )
    try:
        wait_for(
            lambda: [has_handler(pid, signal.SIGUSR2) for pid in descendants_of(guard.pid)] == [True, False],
            "program and its child",
        )
        guard.send_signal(signal.SIGUSR2)
        wait_for(lambda: "in hang_here" in log.read_text(), "its stacks")
        assert len(descendants_of(guard.pid)) == 2
    finally:
        guard.terminate()
        guard.wait(timeout=PATIENCE_S)
