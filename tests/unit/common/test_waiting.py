"""Transient errors of a run directory end nothing: known values stay, the error is reported once, reading continues.

A file that cannot be read is a folder of its name here: reading it is an OSError other than "no such file".
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from pathlib import Path

import pytest

from primerl_hpc.common.errors import TimeoutWaitingError
from primerl_hpc.common.files import write_json, write_text
from primerl_hpc.common.waiting import (
    Backoff,
    Polling,
    TransientIOErrors,
    paced,
    repeating,
    retry,
    retry_async,
    retry_io,
    wait_until,
)
from primerl_hpc.orchestrator.checkpoint.follower import SIDES, CheckpointFollower
from primerl_hpc.orchestrator.engines.fleet import Fleet
from primerl_hpc.orchestrator.rollouts.teacher import TeacherClient
from primerl_hpc.orchestrator.rollouts.traces import TraceWriter
from primerl_hpc.orchestrator.setup import ROUTER, RouterAddress
from primerl_hpc.recipe.schema.model import Teacher
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.rollouts.filesystem import FilesystemReceiver, FilesystemSender
from primerl_hpc.transport.rollouts.micro_batch import StepInfo, empty_row
from tests.support.helpers import PATIENCE_S, wait_for, wait_for_async

TOLD = "retrying"


def make_unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


def test_a_router_whose_endpoint_cannot_be_read_keeps_its_address_and_is_reported_once(tmp_path, caplog):
    run = RunDir(tmp_path)
    router = RouterAddress(run)
    publish_endpoint(run, ROUTER, "http://a:1/")
    assert router.refresh() == "http://a:1"
    for _ in range(2):
        make_unreadable(run.endpoint(ROUTER))
        with caplog.at_level(logging.WARNING):
            assert [router.refresh() for _ in range(3)] == ["http://a:1"] * 3
        run.endpoint(ROUTER).rmdir()
        assert router.refresh() is None  # a missing endpoint is another case
        publish_endpoint(run, ROUTER, "http://a:1/")
        assert router.refresh() == "http://a:1"
    assert caplog.text.count(TOLD) == 2


def test_polling_checks_at_once_and_once_more_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(pause_s: float) -> None:
        nonlocal now
        now += pause_s

    with monkeypatch.context() as patch:
        patch.setattr("primerl_hpc.common.waiting.time.monotonic", lambda: now)
        patch.setattr("primerl_hpc.common.waiting.time.sleep", sleep)
        assert [now for _ in Polling(0, 2)] == [0]
        assert [now for _ in Polling(5, 2)] == [0, 2, 4, 6]
        assert Polling(5, 2).last(lambda: now, lambda found: found >= 8) == 8
        assert Polling(5, 2).last(lambda: now, lambda found: False) == 14

    async def count() -> int:
        return len([None async for _ in Polling(0, 60)])

    assert asyncio.run(count()) == 1


def test_a_teacher_that_cannot_be_looked_up_stays_where_it_was(tmp_path):
    run = RunDir(tmp_path)
    publish_endpoint(run, "teacher-0", "http://a:1")
    teacher = TeacherClient(run, Teacher.model_validate({"model": {"name": "t"}}))
    assert teacher.refresh() == ["http://a:1/v1"]
    make_unreadable(run.endpoint("teacher-0"))
    assert teacher.refresh() == ["http://a:1/v1"]
    asyncio.run(teacher.close())


def test_engines_that_cannot_be_looked_up_are_those_that_were_there(tmp_path):
    run = RunDir(tmp_path)
    publish_endpoint(run, "inference-0", "http://a:1")
    fleet = Fleet(run, run_keys(run))
    before = fleet.policy()
    make_unreadable(run.endpoint("inference-0"))
    assert fleet.policy() == before and [*before] == ["inference-0"]
    asyncio.run(fleet.close())


def test_a_checkpoint_that_cannot_be_written_now_is_written_at_the_next_look(tmp_path):
    run = RunDir(tmp_path)
    follower = CheckpointFollower(run, "trainer-0")
    follower.remember(1, {}, [])
    run.finish_checkpoint_side(1, "trainer", SIDES)
    write_text(run.checkpoint_side(1, "orchestrator"), "in the way")
    assert follower.follow() == [] and follower.patience.is_failing and not follower.is_complete(1)
    run.checkpoint_side(1, "orchestrator").unlink()
    assert follower.follow() == [1] and not follower.patience.is_failing


def test_a_stop_that_cannot_be_seen_now_is_seen_at_the_next_look(tmp_path):
    run = RunDir(tmp_path)
    follower = CheckpointFollower(run, "trainer-0")
    write_text(run.stop_request, "")
    run.outcome("trainer-0").mkdir(parents=True)
    assert follower.stopped_at() is None
    run.outcome("trainer-0").rmdir()
    write_json(run.outcome("trainer-0"), {"outcome": "stopped", "step": 4})
    assert follower.stopped_at() == 4


def test_traces_that_cannot_be_appended_now_are_kept(tmp_path):
    writer = TraceWriter(tmp_path / "train.jsonl")
    writer.add_failure(env="e", task="1", version=0, error="x")
    writer.path.mkdir()
    with pytest.raises(OSError):
        writer.flush()
    writer.path.rmdir()
    writer.add_failure(env="e", task="2", version=0, error="x")
    writer.flush()
    assert [line.split('"task":')[1][1] for line in writer.path.read_text().splitlines()] == ["1", "2"]


def test_a_batch_that_cannot_be_written_now_is_sent_when_the_filesystem_answers(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("primerl_hpc.common.waiting.IO_RETRY_PAUSE_S", 0.01)
    run = RunDir(tmp_path)
    write_text(run.rollouts, "in the way")

    async def check() -> None:
        sending = asyncio.create_task(
            retry_io("a batch", lambda: FilesystemSender(run).send(StepInfo(1), [[empty_row()]]))
        )
        await wait_for_async(lambda: TOLD in caplog.text, "the warning")
        run.rollouts.unlink()
        async with asyncio.timeout(PATIENCE_S):
            await sending

    asyncio.run(check())
    assert FilesystemReceiver(run).is_ready(1)


def test_what_does_not_end_within_the_limit_is_not_outlasted(monkeypatch):
    monkeypatch.setattr("primerl_hpc.common.waiting.IO_RETRY_LIMIT_S", 0.0)
    monkeypatch.setattr("primerl_hpc.common.waiting.IO_RETRY_PAUSE_S", 0.01)

    def act() -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input"):
        asyncio.run(retry_io("a batch", act))


def test_a_full_disk_is_no_moments_fault():
    with pytest.raises(OSError), TransientIOErrors("the checkpoints"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_what_lasts_longer_than_the_limit_is_a_fault(monkeypatch):
    now, patience, error = (
        0.0,
        TransientIOErrors("the run directory", 60.0),
        OSError(errno.ESTALE, "Stale file handle"),
    )
    monkeypatch.setattr("primerl_hpc.common.waiting.time.monotonic", lambda: now)
    with patience:
        raise error
    now = 60.0
    with patience:
        raise error
    with patience:
        pass
    assert not patience.is_failing
    now = 61.0
    with patience:
        raise error
    now = 122.0
    with pytest.raises(OSError, match="Stale"), patience:
        raise error


def test_wait_until_returns_the_first_result_that_is_not_none_or_false():
    results = iter([None, False, 0])
    assert wait_until(lambda: next(results), what="a result", timeout_s=PATIENCE_S, poll_s=0.001) == 0


def test_a_wait_that_times_out_names_what_is_missing():
    seen = []

    def poll() -> None:
        seen.append(None)

    def what() -> str:
        return f"engines ({len(seen)} polls)"

    with pytest.raises(TimeoutWaitingError, match=r"waited 0 s for engines \(1 polls\)"):
        wait_until(poll, what=what, timeout_s=0)


@pytest.mark.parametrize("is_async", [False, True])
def test_retry_ends_at_the_first_result_that_is_not_retried(is_async):
    outcomes, pauses = iter([ConnectionError("busy"), "wait", "done", "later"]), []

    def call() -> str:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def call_async() -> str:
        return call()

    options = {
        "if_raises": ConnectionError,
        "if_result": lambda result: result == "wait",
        "before_pause": lambda error, pause_s: pauses.append((str(error), pause_s)),
    }
    backoff = Backoff(limit_s=30, first_s=0.001, last_s=0.0015)
    found = (
        asyncio.run(retry_async(call_async, backoff, **options))
        if is_async
        else retry(call, backoff, **options)
    )
    assert found == "done"
    assert pauses == [("busy", 0.001), ("None", 0.0015)]


def test_retry_gives_the_last_outcome_when_the_next_call_would_be_too_late():
    def refuse() -> str:
        raise ConnectionError("busy")

    backoff = Backoff(limit_s=0.5, first_s=1.0)
    with pytest.raises(ConnectionError, match="busy"):
        retry(refuse, backoff, if_raises=ConnectionError)
    assert retry(lambda: "no answer", backoff, if_result=lambda result: True) == "no answer"


def test_retry_raises_other_errors_at_once():
    calls = []

    def fail() -> None:
        calls.append(None)
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        retry(fail, Backoff(limit_s=30), if_raises=ConnectionError)
    assert len(calls) == 1


def test_an_action_repeats_until_the_block_ends_also_after_an_os_error() -> None:
    calls: list[float] = []

    def act() -> None:
        calls.append(time.monotonic())
        if len(calls) == 1:
            raise OSError

    with repeating(0.001, act):
        wait_for(lambda: len(calls) >= 3, "three calls")
    num_calls = len(calls)
    with repeating(1000, act):
        pass
    assert len(calls) == num_calls


def test_a_long_wait_looks_rarely_and_ends_at_most_a_hundredth_late() -> None:
    assert paced(0.0, 0.2, 2.0) == paced(20.0, 0.2, 2.0) == 0.2
    assert paced(100.0, 0.2, 2.0) == 1.0 and paced(1e6, 0.2, 2.0) == 2.0
