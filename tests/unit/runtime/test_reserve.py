"""Writes of the supervisor to full disks, with its reserve for the failure report, and during transient errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from primerl_hpc.common.files import read_jsonl
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.files.journal import Journal
from primerl_hpc.runtime.files.reserve import PIECE_BYTES, PIECES, DiskReserve


def held(reserve: DiskReserve) -> int:
    return sum(path.stat().st_size for path in reserve.folder.iterdir())


def test_space_is_kept_and_given_back_piece_by_piece(tmp_path: Path) -> None:
    reserve = DiskReserve(tmp_path / "reserve")
    reserve.make()
    reserve.make()  # of an earlier incarnation that was killed
    assert held(reserve) == PIECES * PIECE_BYTES
    reserve.spend()
    assert held(reserve) == (PIECES - 1) * PIECE_BYTES
    for _ in range(PIECES):
        reserve.spend()
    reserve.release()
    assert not reserve.folder.exists()
    reserve.spend()


def test_a_full_disk_is_reported_with_the_systems_message(tmp_path: Path) -> None:
    reserve = DiskReserve(tmp_path / "reserve")
    assert reserve.why_full() is None and list(tmp_path.iterdir()) == []
    (tmp_path / ".probe").symlink_to("/dev/full")
    assert reserve.why_full() == "No space left on device"


def test_the_report_of_a_failure_does_not_wait_for_a_filesystem_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("primerl_hpc.runtime.files.reserve.PROBE_S", 0.1)
    os.mkfifo(tmp_path / ".probe")  # opening it waits until another process reads
    reserve = DiskReserve(tmp_path / "reserve")
    assert reserve.why_full() is None and reserve.why_full() is None
    (tmp_path / ".probe").read_bytes()  # lets the thread end


def test_on_a_full_disk_only_vital_records_are_written(tmp_path: Path) -> None:
    journal = Journal(RunDir(tmp_path / "run"), attempt=1)
    journal.reserve.make()
    tries: list[int] = []

    def write() -> None:
        tries.append(held(journal.reserve))
        if len(tries) != 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    journal.write(write)
    journal.catch_up()
    assert tries == [PIECES * PIECE_BYTES]  # a state that is a moment old is no reason to spend anything
    journal.write(write, is_vital=True)
    journal.catch_up()
    assert tries[2] == (PIECES - 1) * PIECE_BYTES
    assert len(tries) == 3


def test_records_that_fail_with_transient_errors_are_written_later_in_order(tmp_path: Path) -> None:
    """No decision waits for a file, so a write raises nothing; `catch_up` reports errors that last."""
    journal = Journal(RunDir(tmp_path / "run"), attempt=1)
    (tmp_path / "run").write_text("no folder")  # whatever is to be written below it is an OSError
    journal.record("role_exited", process="trainer-0")
    journal.record("run_done")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        journal.catch_up()
    (tmp_path / "run").unlink()
    journal.record("run_stopped")
    journal.catch_up()
    written = [row["event"] for row in read_jsonl(journal.run_dir.events)]
    assert written == ["role_exited", "run_done", "run_stopped"]
