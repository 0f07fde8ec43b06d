"""A run directory that falters for a moment ends nothing: what was known stands, is told once, and the next look goes on.

A file that cannot be read is a folder of its name here: reading it is an OSError other than "no such file".
"""

from __future__ import annotations

import asyncio
import errno
import logging
from pathlib import Path

import pytest

from primerl_hpc.common.files import write_json, write_text
from primerl_hpc.common.patience import Patience, outlast
from primerl_hpc.common.rundir import RunDir, publish_endpoint
from primerl_hpc.orchestrator.checkpoints import SIDES, CheckpointFollower
from primerl_hpc.orchestrator.fleet import Fleet
from primerl_hpc.orchestrator.setup import ROUTER, RouterAddress
from primerl_hpc.orchestrator.teacher import TeacherClient
from primerl_hpc.orchestrator.traces import TraceWriter
from primerl_hpc.recipe.model_schema import Teacher
from primerl_hpc.transport.rollouts import StepInfo, empty_row
from primerl_hpc.transport.rollouts_filesystem import FilesystemReceiver, FilesystemSender

TOLD = "trying again"


def make_unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


def test_a_router_that_cannot_be_looked_up_stays_where_it_was_and_is_told_of_once(tmp_path, caplog):
    run = RunDir(tmp_path)
    router = RouterAddress(run)
    publish_endpoint(run, ROUTER, "http://a:1/")
    assert router.refresh() == "http://a:1"
    for _ in range(2):
        make_unreadable(run.endpoint(ROUTER))
        with caplog.at_level(logging.WARNING):
            assert [router.refresh() for _ in range(3)] == ["http://a:1"] * 3
        run.endpoint(ROUTER).rmdir()
        assert router.refresh() is None  # gone is something else
        publish_endpoint(run, ROUTER, "http://a:1/")
        assert router.refresh() == "http://a:1"
    assert caplog.text.count(TOLD) == 2


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
    fleet = Fleet(run, "key")
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
    assert follower.follow() == [] and follower.patience.is_tried and not follower.is_complete(1)
    run.checkpoint_side(1, "orchestrator").unlink()
    assert follower.follow() == [1] and not follower.patience.is_tried


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
    monkeypatch.setattr("primerl_hpc.common.patience.AGAIN_S", 0.01)
    run = RunDir(tmp_path)
    write_text(run.rollouts, "in the way")

    async def check() -> None:
        sending = asyncio.create_task(
            outlast("a batch", lambda: FilesystemSender(run).send(StepInfo(1), [[empty_row()]]))
        )
        async with asyncio.timeout(60):
            while TOLD not in caplog.text:
                await asyncio.sleep(0.01)
            run.rollouts.unlink()
            await sending

    asyncio.run(check())
    assert FilesystemReceiver(run).is_ready(1)


def test_what_does_not_end_within_the_limit_is_not_outlasted(monkeypatch):
    monkeypatch.setattr("primerl_hpc.common.patience.FALTERS_S", 0.0)
    monkeypatch.setattr("primerl_hpc.common.patience.AGAIN_S", 0.01)

    def act() -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input"):
        asyncio.run(outlast("a batch", act))


def test_a_full_disk_is_no_moments_fault():
    with pytest.raises(OSError), Patience("the checkpoints"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_what_lasts_longer_than_the_limit_is_a_fault(monkeypatch):
    now, patience, error = (
        0.0,
        Patience("the run directory", 60.0),
        OSError(errno.ESTALE, "Stale file handle"),
    )
    monkeypatch.setattr("primerl_hpc.common.patience.time.monotonic", lambda: now)
    with patience:
        raise error
    now = 60.0
    with patience:
        raise error
    with patience:
        pass
    assert not patience.is_tried
    now = 61.0
    with patience:
        raise error
    now = 122.0
    with pytest.raises(OSError, match="Stale"), patience:
        raise error
