"""Locks of files, on filesystems that have none too. Tests of callers use the fixture ``no_locks``."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from primerl_hpc.common.locks import is_stale, lock_file, no_locks_error, take_exclusive
from primerl_hpc.run.ledger.rows import LedgerRow
from primerl_hpc.run.ledger.store import append_rows, read_rows
from tests.support.helpers import ROOT

CALLERS = {
    "common/node/compile_caches.py": "tests/unit/common/node/test_compile_caches.py",
    "inference/worker/mirror.py": "tests/unit/transport/test_weights_delta.py",
    "launch/planning/advice.py": "tests/unit/launch/planning/test_measured.py",
    "offline/prefetch/fetch.py": "tests/unit/offline/test_prefetch.py",
    "recipe/sft/tables.py": "tests/unit/offline/test_prefetch.py",
    "run/ledger/store.py": "tests/unit/common/test_locks.py",
    "run/access/private_tmp.py": "tests/unit/runtime/test_site_variables.py",
    "transport/base_models/staging.py": "tests/unit/transport/test_base_models.py",
}
"""Module → the test that runs it where there are no locks."""


def test_every_caller_is_tested_without_locks_and_no_other_module_locks() -> None:
    package = ROOT / "primerl_hpc"
    texts = {str(path.relative_to(package)): path.read_text() for path in package.rglob("*.py")}
    del texts["common/locks.py"]
    assert {
        path for path, text in texts.items() if re.search(r"lock_file\(|no_locks_error\(", text)
    } == CALLERS.keys()
    assert not [path for path, text in texts.items() if re.search(r"\b(flock|lockf|FileLock)\(", text)]
    assert all("no_locks" in (ROOT / test).read_text() for test in CALLERS.values())


@pytest.mark.usefixtures("no_locks")
def test_the_ledger_is_written_on_a_filesystem_without_locks(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with path.open("a") as file:
        assert lock_file(file.fileno(), between_nodes=True) is False
    rows = [LedgerRow(figure="time.step", measured=2.0, predicted=1.0, unit="s", gpu="H100-SXM")]
    assert append_rows(path, rows) == 1
    assert [row.measured for row in read_rows(path, warn=print)] == [2.0]


def test_other_errors_of_a_lock_are_raised(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        closed = file.fileno()
    with pytest.raises(OSError, match="Bad file descriptor"):
        lock_file(closed)


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EINVAL])
def test_a_library_that_needs_locks_is_reported_with_its_folder(tmp_path: Path, number: int) -> None:
    error = no_locks_error(OSError(number, os.strerror(number)), "datasets", {"HF_DATASETS_CACHE": tmp_path})
    assert error is not None and error.hint.startswith("set HF_DATASETS_CACHE")
    assert error.cause == (
        f"{tmp_path} is on a filesystem without file locks, which package datasets needs ({os.strerror(number)})"
    )


def test_the_same_error_of_a_folder_with_locks_has_another_reason(tmp_path: Path) -> None:
    error = OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    assert no_locks_error(error, "datasets", {"HF_DATASETS_CACHE": tmp_path}) is None


def test_the_file_of_a_killed_process_is_replaced_when_it_is_stale(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert take_exclusive(path, 60) and not take_exclusive(path, 60)
    os.utime(path, (0, 0))
    assert is_stale(path, 60) and take_exclusive(path, 60) and not is_stale(path, 60)
    assert is_stale(tmp_path / "missing", 60)


OVERTAKEN = """
import os, sys
from pathlib import Path
from primerl_hpc.common.locks import take_exclusive

path, others = Path(sys.argv[1]), []

def overtake(event, arguments):
    if event in ("os.remove", "os.rename") and str(arguments[0]) == str(path) and not others:
        others.append(None)
        others[0] = take_exclusive(path, 60)

sys.addaudithook(overtake)
print(take_exclusive(path, 60), *others)
"""


def test_one_of_two_processes_that_find_a_stale_file_takes_it(tmp_path: Path) -> None:
    """The second one does everything between the moment when the first has found it stale and its removal."""
    path = tmp_path / "lock"
    path.write_text("")
    os.utime(path, (0, 0))
    command = [sys.executable, "-c", OVERTAKEN, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    assert [file.name for file in tmp_path.iterdir()] == ["lock"]
    assert not take_exclusive(path, 60), "the file of the process that has it is there"
