"""Temporary folders and compile caches: unguessable names, and no files of other users inside."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from primerl_hpc.common.names import Role
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.steps.private_tmp import CACHES, NAME_VARIABLE, PrivateTmp
from primerl_hpc.runtime.types import Launch
from tests.support.helpers import ROOT, process_plan
from tests.support.stranger import NOBODY, as_stranger

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.fixture
def node_tmp(tmp_path: Path) -> Path:
    """A folder like /tmp: all users can create files and delete only their own."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o055 != 0o055:
            folder.chmod(0o755)  # pytest's own
    made = tmp_path / "tmp"
    made.mkdir()
    made.chmod(0o1777)
    return made


def seen_by_role(node_tmp: Path, name: str) -> dict[str, str]:
    """Return the environment of a process that a guard started."""
    outer = {variable: value for variable, value in os.environ.items() if variable not in CACHES}
    done = subprocess.run(
        [sys.executable, "-m", "primerl_hpc.runtime.steps.guard", "--", sys.executable, "-c", SHOW],
        env={**outer, "TMPDIR": str(node_tmp), NAME_VARIABLE: name, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_temporary_files_and_caches_are_in_a_private_folder_of_the_run(node_tmp: Path) -> None:
    """A cache of torch contains pickles, so the user who creates its folder first could run code in the job."""
    seen = seen_by_role(node_tmp, ".p0123456789ab")
    folder = Path(seen["TMPDIR"])
    assert folder == node_tmp / ".p0123456789ab"
    for variable in CACHES:
        assert Path(seen[variable]).parent == folder
    assert not folder.exists(), "the last guard of the node deletes it"


def test_a_folder_that_another_user_created_first_is_not_used(node_tmp: Path) -> None:
    planted = node_tmp / ".p0123456789ab"
    as_stranger(lambda: (planted / "inductor").mkdir(parents=True))
    seen = seen_by_role(node_tmp, planted.name)
    assert Path(seen["TMPDIR"]) != planted and Path(seen["TMPDIR"]).parent == node_tmp
    assert os.stat(planted).st_uid == NOBODY
    planted_link = node_tmp / ".plink"
    as_stranger(lambda: planted_link.symlink_to(planted))
    assert Path(seen_by_role(node_tmp, planted_link.name)["TMPDIR"]) != planted_link


def test_guards_of_a_node_share_the_folder_and_the_last_one_deletes_it(
    node_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {NAME_VARIABLE: ".pshared", "TMPDIR": str(node_tmp)}
    first = PrivateTmp.create(dict(environment))
    assert first is not None
    assert stat.S_IMODE(first.folder.stat().st_mode) == 0o700
    (first.folder / "kept").touch()
    seen = seen_by_role(node_tmp, ".pshared")
    assert Path(seen["TMPDIR"]) == first.folder
    assert (first.folder / "kept").exists(), "another process still uses it"
    first.release()
    assert not first.folder.exists()
    assert PrivateTmp.create({"TMPDIR": str(node_tmp)}) is None


def test_the_folder_name_is_derived_from_the_attempts_keys(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    names = {
        Launch(process_plan(Role.TRAINER), run, "main", attempt, 0).environment[NAME_VARIABLE]
        for attempt in (1, 2)
    }
    assert len(names) == 2 and run_keys(run, 1).temporary_name in names
    assert all(len(name) <= 14 for name in names)
