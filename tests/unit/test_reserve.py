"""What the supervisor writes on disks that are full, with the space it keeps for last words, or that falter for a while."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from primerl_hpc.common.files import read_jsonl
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.runtime.journal import Journal
from primerl_hpc.runtime.reserve import PIECE_BYTES, PIECES, Reserve


def held(reserve: Reserve) -> int:
    return sum(path.stat().st_size for path in reserve.folder.iterdir())


def test_space_is_kept_and_given_back_piece_by_piece(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path / "reserve")
    reserve.make()
    reserve.make()  # of an earlier life that was killed
    assert held(reserve) == PIECES * PIECE_BYTES
    reserve.spend()
    assert held(reserve) == (PIECES - 1) * PIECE_BYTES
    for _ in range(PIECES):
        reserve.spend()
    reserve.release()
    assert not reserve.folder.exists()
    reserve.spend()


def test_a_full_disk_is_told_in_the_systems_words(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path / "reserve")
    assert reserve.why_full() is None and list(tmp_path.iterdir()) == []
    (tmp_path / ".probe").symlink_to("/dev/full")
    assert reserve.why_full() == "No space left on device"


def test_on_a_full_disk_only_what_is_vital_is_written(tmp_path: Path) -> None:
    journal = Journal(RunDir(tmp_path / "run"), attempt=1)
    journal.reserve.make()
    tries: list[int] = []

    def write() -> None:
        tries.append(held(journal.reserve))
        if len(tries) != 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    journal.write(write)
    assert tries == [PIECES * PIECE_BYTES]  # a state that is a moment old is no reason to spend anything
    journal.write(write, is_vital=True)
    assert tries[2] == (PIECES - 1) * PIECE_BYTES
    journal.catch_up()
    assert len(tries) == 3


def test_what_a_faltering_run_directory_does_not_take_is_written_later_and_in_order(tmp_path: Path) -> None:
    """No decision waits for a file, so a write raises nothing; who watches the run hears of it from `catch_up`."""
    journal = Journal(RunDir(tmp_path / "run"), attempt=1)
    (tmp_path / "run").write_text("no folder")  # whatever is to be written below it is an OSError
    journal.record("role_exited", process="trainer-0")
    journal.record("run_done")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        journal.catch_up()
    (tmp_path / "run").unlink()
    journal.record("run_stopped")
    written = [row["event"] for row in read_jsonl(journal.run_dir.events)]
    assert written == ["role_exited", "run_done", "run_stopped"]
    journal.catch_up()
