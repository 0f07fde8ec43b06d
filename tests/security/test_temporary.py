"""Temporary folders and compile caches: unguessable names, and no files of other users inside."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from primerl_hpc.checks.machine import check_scratch
from primerl_hpc.common.names import Role
from primerl_hpc.roles.scratch import scratch_folder
from primerl_hpc.run.access import private_tmp
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.access.private_tmp import CACHES, LOCK, NAME_VARIABLE, PrivateTmp, delete_abandoned
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.step import Launch
from tests.support.helpers import ROOT, process_plan, wait_for
from tests.support.stranger import NOBODY, as_stranger, run_in_child

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"

FILL = """
import os, time
os.makedirs(os.environ["TMPDIR"] + "/base-models/x")
for name in ("base-models/x/model.safetensors", "file"):
    open(os.path.join(os.environ["TMPDIR"], name), "w").close()
print("ready", flush=True)
time.sleep(3600)
"""


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


def test_nothing_is_deleted_where_others_can_rename_folders_and_the_check_of_scratch_warns(
    node_tmp: Path, tmp_path: Path
) -> None:
    """A stranger renames a folder of the user to a name that guards and roles delete."""
    node_tmp.chmod(0o777)
    run = RunDir(tmp_path / "run")
    abandoned = run_keys(run, 1).temporary_name
    for name in ("results", "paper"):
        (node_tmp / name).mkdir(mode=0o700)
        (node_tmp / name / LOCK).touch()
        (node_tmp / name / "kept").touch()
    with scratch_folder(run, "env_server-0", str(node_tmp)) as folder:
        pass
    as_stranger(lambda: (node_tmp / "results").rename(node_tmp / abandoned))
    as_stranger(lambda: (node_tmp / "paper").rename(folder))
    assert delete_abandoned(node_tmp) == [] and (node_tmp / abandoned / "kept").exists()
    with scratch_folder(run, "env_server-0", str(node_tmp)) as used:
        assert used != folder
    assert (folder / "kept").exists()
    warnings = [found.message for found in check_scratch(str(node_tmp), 0) if found.level == "warn"]
    assert f"rename the entries of {node_tmp}" in warnings[0]
    node_tmp.chmod(0o1777)
    assert not any("rename the entries" in found.message for found in check_scratch(str(node_tmp), 0))


def start_guard(node_tmp: Path, name: str, code: str) -> subprocess.Popen[str]:
    """Start a guard whose process runs ``code``."""
    outer = {variable: value for variable, value in os.environ.items() if variable not in CACHES}
    return subprocess.Popen(
        [sys.executable, "-m", "primerl_hpc.runtime.steps.guard", "--", sys.executable, "-c", code],
        env={**outer, "TMPDIR": str(node_tmp), NAME_VARIABLE: name, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told_by_role(node_tmp: Path, name: str) -> tuple[dict[str, str], str]:
    """Return the environment of a process that a guard started, and the guard's messages."""
    guard = start_guard(node_tmp, name, SHOW)
    output, messages = guard.communicate()
    assert guard.returncode == 0, messages
    return json.loads(output), messages


def seen_by_role(node_tmp: Path, name: str) -> dict[str, str]:
    return told_by_role(node_tmp, name)[0]


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


def left_by_killed_guard(node_tmp: Path, name: str = ".p00000000dead-7") -> Path:
    """Return the folder of a guard that was killed after its process had written files."""
    guard = start_guard(node_tmp, name, FILL)
    assert guard.stdout is not None and guard.stdout.readline() == "ready\n"
    guard.send_signal(signal.SIGKILL)
    guard.communicate()  # its process dies with it
    assert (node_tmp / name / "base-models" / "x" / "model.safetensors").exists()
    return node_tmp / name


def test_what_a_killed_run_left_on_a_node_is_deleted_by_the_next_one(node_tmp: Path) -> None:
    """It contains copies of base models. SLURM kills a job that does not end in time, and a node's disk survives."""
    left = left_by_killed_guard(node_tmp)
    _, messages = told_by_role(node_tmp, ".p0123456789ab")
    assert messages == f"guard: deleted {left}, which a killed run left\n"
    assert list(node_tmp.iterdir()) == []


def test_the_check_of_a_node_deletes_it_before_free_space_is_measured(node_tmp: Path) -> None:
    left_by_killed_guard(node_tmp)
    *_, found = check_scratch(str(node_tmp), 0)
    assert found.level == "ok" and found.message.endswith("; folders of killed runs deleted: 1")
    *_, found = check_scratch(str(node_tmp), 0)
    assert "killed" not in found.message and list(node_tmp.iterdir()) == []


def folder_with_a_file(node_tmp: Path) -> Path:
    """Return a folder that this process holds until it ends."""
    tmp = PrivateTmp.create({NAME_VARIABLE: ".p00000000dead", "TMPDIR": str(node_tmp)})
    assert tmp is not None
    (tmp.folder / "kept").touch()
    return tmp.folder


def readable_by_others(folder: Path) -> None:
    folder.chmod(0o750)


def owned_by_another_user(folder: Path) -> None:
    os.chown(folder, NOBODY, NOBODY)


def without_a_lock(folder: Path) -> None:
    (folder / LOCK).unlink()


def whose_lock_is_a_link(folder: Path) -> None:
    (folder / LOCK).rename(folder / "other")
    (folder / LOCK).symlink_to("other")


def replaced_by_a_link(folder: Path) -> None:
    target = folder.rename(folder.with_name("home"))
    folder.symlink_to(target)


def with_another_name(folder: Path) -> None:
    folder.rename(folder.with_name(".poetry-cache"))


@pytest.mark.parametrize(
    "change",
    [
        readable_by_others,
        owned_by_another_user,
        without_a_lock,
        whose_lock_is_a_link,
        replaced_by_a_link,
        with_another_name,
    ],
)
def test_a_folder_that_may_be_in_use_or_is_not_one_of_a_run_is_kept(
    node_tmp: Path, change: Callable[[Path], None]
) -> None:
    change(run_in_child(lambda: folder_with_a_file(node_tmp), lambda: None))
    assert delete_abandoned(node_tmp) == []
    assert len(list(node_tmp.rglob("kept"))) == 1


def test_the_folder_of_a_living_guard_is_kept(node_tmp: Path) -> None:
    folder = folder_with_a_file(node_tmp)
    assert told_by_role(node_tmp, ".p0123456789ab")[1] == "" and (folder / "kept").exists()


@pytest.mark.parametrize("filesystem", ["nfs4", "lustre", "fuse.juicefs", ""])
def test_nothing_is_deleted_on_a_filesystem_that_other_nodes_may_use(
    node_tmp: Path, monkeypatch: pytest.MonkeyPatch, filesystem: str
) -> None:
    folder = run_in_child(lambda: folder_with_a_file(node_tmp), lambda: None)
    monkeypatch.setattr(private_tmp, "filesystem_of", lambda _: filesystem)
    assert delete_abandoned(node_tmp) == [] and (folder / "kept").exists()


@pytest.mark.parametrize("opened_before", [0, 1], ids=["the folder", "its lock"])
def test_a_folder_that_is_deleted_while_a_guard_enters_is_created_again(
    node_tmp: Path, monkeypatch: pytest.MonkeyPatch, opened_before: int
) -> None:
    opened, paths = os.open, []

    def open_after_deletion(path: Path | str, *rest: int, **options: int | None) -> int:
        paths.append(path)
        if len(paths) == 1 + opened_before:
            os.rmdir(paths[0])
        return opened(path, *rest, **options)

    monkeypatch.setattr(os, "open", open_after_deletion)
    tmp = PrivateTmp.create({NAME_VARIABLE: ".p0123456789ab", "TMPDIR": str(node_tmp)})
    monkeypatch.undo()
    assert tmp is not None and len(paths) == 3 + opened_before and (tmp.folder / LOCK).exists()
    tmp.release()
    assert not tmp.folder.exists()


def holds_open(pid: int, path: Path) -> bool:
    return any(os.path.realpath(link) == str(path) for link in Path(f"/proc/{pid}/fd").iterdir())


def test_a_folder_that_another_user_creates_between_two_guards_is_not_used(node_tmp: Path) -> None:
    """The name is visible while the first guard runs, so a stranger can wait until that guard deletes the folder."""
    ending = PrivateTmp.create({NAME_VARIABLE: ".p0123456789ab", "TMPDIR": str(node_tmp)})
    assert ending is not None
    fcntl.flock(ending._lock, fcntl.LOCK_EX)  # as a guard that has begun to delete it
    guard = start_guard(node_tmp, ".p0123456789ab", SHOW)
    wait_for(lambda: holds_open(guard.pid, ending.folder / LOCK), "a guard that waits for the lock")
    shutil.rmtree(ending.folder)

    def plant() -> None:
        (ending.folder / "inductor").mkdir(parents=True)
        (ending.folder / LOCK).touch()
        for path in (ending.folder, ending.folder / LOCK):
            path.chmod(0o777)

    as_stranger(plant)
    os.close(ending._lock)
    output, messages = guard.communicate()
    assert guard.returncode == 0, messages
    used = Path(json.loads(output)["TMPDIR"])
    assert used.parent == node_tmp and used != ending.folder
    assert ending.folder.stat().st_uid == NOBODY and not used.exists()


def test_a_process_starts_although_another_user_took_the_name_of_its_scratch_folder(node_tmp: Path) -> None:
    run = RunDir(node_tmp / "run")

    def enter() -> tuple[Path, int]:
        with scratch_folder(run, "inference-0", str(node_tmp)) as folder:
            return folder, stat.S_IMODE(folder.stat().st_mode)

    planted, _ = as_stranger(enter, uid=NOBODY - 1)
    as_stranger(planted.mkdir)
    used, mode = as_stranger(enter, uid=NOBODY - 1)
    assert used.parent == node_tmp and used != planted and mode == 0o700 and not used.exists()


def test_the_folder_name_is_derived_from_the_attempts_keys(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    names = {
        Launch(process_plan(Role.TRAINER), run, "main", attempt, 0).environment[NAME_VARIABLE]
        for attempt in (1, 2)
    }
    assert len(names) == 2 and run_keys(run, 1).temporary_name in names
    assert all(len(name) <= 14 for name in names)
