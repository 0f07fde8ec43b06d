"""The supervisor's space for last words: kept from the start, given back piece by piece, and honest about full disks."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from primerl_hpc.common.rundir import RunDir
from primerl_hpc.runtime.reserve import PIECE_BYTES, PIECES, Reserve
from primerl_hpc.runtime.supervisor import Supervisor
from tests.support import make_plan, process_plan


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


def test_on_a_full_disk_only_what_is_vital_is_written_and_other_faults_are_raised(tmp_path: Path) -> None:
    from primerl_hpc.common.names import Role

    make_plan(
        tmp_path / "run",
        {
            "kind": "rl",
            "name": "toy",
            "model": {"name": "a/b"},
            "max_steps": 1,
            "environments": {"train": [{"id": "x"}]},
        },
        processes=[process_plan(Role.TRAINER)],
    )
    supervisor = Supervisor(RunDir(tmp_path / "run"))
    supervisor.reserve.make()
    tries: list[int] = []

    def write() -> None:
        tries.append(held(supervisor.reserve))
        if len(tries) != 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    supervisor.write(write)
    assert tries == [PIECES * PIECE_BYTES]  # a state that is a moment old is no reason to spend anything
    supervisor.write(write, is_vital=True)
    assert tries[2] == (PIECES - 1) * PIECE_BYTES

    def forbidden() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        supervisor.write(forbidden, is_vital=True)
