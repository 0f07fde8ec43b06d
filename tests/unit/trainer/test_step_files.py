"""Training continues while the run directory does not respond; nothing is lost or reordered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest

pytest.importorskip("torch")

from primerl_hpc.common.files import write_json, write_text
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer import control
from primerl_hpc.trainer.control import IDLE_POLL_S, Next, StepFiles, _Wait
from primerl_hpc.transport.rollouts.filesystem import FilesystemReceiver
from tests.support.helpers import PATIENCE_S, wait_for


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Calls that wait for the event are late, and so may be any other call."""
    monkeypatch.setattr(control, "PATIENCE_S", 0.05)
    monkeypatch.setattr(control, "REPORT_AFTER_S", 0.0)
    responds = threading.Event()
    yield responds
    responds.set()


def test_writes_wait_in_order_and_reads_are_omitted_until_the_filesystem_responds(
    stalled: threading.Event,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "rows"

    def append(text: str) -> None:
        with path.open("a") as file:
            file.write(text)

    with StepFiles() as files:
        monkeypatch.setattr(control, "PATIENCE_S", PATIENCE_S)
        files.write(lambda: append("1"))
        assert files.read(path.read_text, "") == "1"
        monkeypatch.setattr(control, "PATIENCE_S", 0.05)
        files.write(lambda: stalled.wait() and append("2"))
        files.write(lambda: append("3"))
        assert files.read(path.read_text, "unknown") == "unknown" and path.read_text() == "1"
        stalled.set()
    assert path.read_text() == "123"
    assert caplog.text.count("does not respond") == caplog.text.count("responds again") == 1


def test_a_call_of_seconds_is_not_reported_as_a_stall(
    stalled: threading.Event, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "REPORT_AFTER_S", 600.0)
    with StepFiles() as files:
        files.write(stalled.wait)
        assert files.read(lambda: "fresh", "unknown") == "unknown"
        stalled.set()
    assert "run directory" not in caplog.text


def test_a_late_read_is_repeated_by_the_next_one(stalled: threading.Event) -> None:
    answers = chain(["late"], repeat("fresh"))

    def look() -> str:
        stalled.wait()
        return next(answers)

    with StepFiles() as files:
        assert files.read(look, "unknown") == "unknown"
        stalled.set()
        wait_for(lambda: files.read(look, "unknown") == "fresh", "a look after the stall")


def test_an_error_is_raised_by_the_call_or_by_the_next_one_if_it_was_late(stalled: threading.Event) -> None:
    def fail() -> None:
        stalled.wait()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"), StepFiles() as files:
        files.write(fail)
        stalled.set()
    with pytest.raises(OSError, match="No space"), StepFiles() as files:
        files.write(fail)
    with pytest.raises(OSError, match="No space"), StepFiles() as files:
        files.read(fail, None)


class Clock:
    now = 0.0
    pauses = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses += 1


def test_a_long_wait_for_a_batch_looks_rarely_and_sees_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, clock = RunDir(tmp_path), Clock()
    monkeypatch.setattr(control, "time", clock)
    wait = _Wait(run, FilesystemReceiver(run), 1)
    while clock.now < 1.0:
        assert wait.round() == Next.WAIT
    assert clock.pauses > 10, "a batch that comes soon is noticed soon"
    while clock.now < 450.0:
        assert wait.round() == Next.WAIT
    before, clock.pauses = clock.now, 0
    while clock.now < before + 60.0:
        assert wait.round() == Next.WAIT
    assert clock.pauses <= (clock.now - before) / IDLE_POLL_S + 1
    write_text(run.full_weights_request, "")
    wait.control.hurry()
    assert wait.round() == Next.FULL_WEIGHTS
    run.full_weights_request.unlink()
    write_json(run.stop_request, {"now": True})  # the supervisor ends the trainer
    wait.control.hurry()
    assert wait.round() == Next.WAIT
    write_text(run.stop_request, "")
    wait.control.hurry()
    assert wait.round() == Next.STOP
