"""Files and the run directory: all or nothing, markers last, torn lines forgiven, one owner."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.common import files
from primerl_hpc.common.errors import DataError, NotFoundError, OccupiedError, TimeoutWaitingError
from primerl_hpc.common.waiting import wait_until
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.endpoints import publish_endpoint, read_endpoint, read_endpoints
from primerl_hpc.run.leases import HeldLease, renew_lease
from primerl_hpc.run.lock import SupervisorLock
from primerl_hpc.run.metrics import MetricsWriter, read_steps
from primerl_hpc.run.registry import find_run, register_run
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import COMPLETE, STABLE
from tests.support.helpers import PATIENCE_S
from tests.support.slurm_rows import UNKNOWN_JOB, printed, queue_row


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        files.write_json(path, {"a": object()})
    assert _write_beyond_the_file_size_limit(path) == errno.EFBIG
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def _write_beyond_the_file_size_limit(path: Path) -> int:
    """The errno of a write that the kernel cuts short, as a full disk or quota would."""
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from primerl_hpc.common.files import write_bytes\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n    write_bytes(Path(sys.argv[1]), b'x' * 5000)\n"
        "except OSError as error:\n    sys.exit(error.errno)\n"
    )
    return subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode


def test_an_append_after_a_torn_line_spoils_only_the_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    files.append_json(path, {"n": 1})
    with path.open("a") as file:
        file.write('{"n": 2, "half')
    files.append_json(path, {"n": 3})
    assert [row["n"] for row in files.read_jsonl(path)] == [1, 3]


def test_only_one_of_many_makes_an_exclusive_file(tmp_path: Path) -> None:
    won: list[bool] = []
    threads = [
        threading.Thread(target=lambda: won.append(files.create_exclusive(tmp_path / "x", "y")))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(won) == 1


def test_waiting_names_what_did_not_come() -> None:
    with pytest.raises(TimeoutWaitingError, match="a miracle"):
        wait_until(lambda: None, what="a miracle", timeout_s=0.05)


def test_metrics_keep_the_last_row_of_a_step_and_nan_is_written_as_text(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.write(2, {"loss": 1.0})
    writer.write(1, {"loss": float("nan")})
    writer.write(2, {"loss": 2.0})
    rows = read_steps(tmp_path / "m.jsonl")
    assert list(rows) == [1, 2] and math.isnan(rows[1]["loss"]) and rows[2]["loss"] == 2.0
    assert '"loss":"nan"' in (tmp_path / "m.jsonl").read_text()  # JSON has no word for it


def test_latest_checkpoint_is_the_highest_complete_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (5, 10, 15):
        run.checkpoint_side(step, "trainer").mkdir(parents=True)
    sides = ("trainer", "orchestrator")
    assert not run.finish_checkpoint_side(10, "trainer", sides)
    assert run.latest_checkpoint() is None
    assert run.finish_checkpoint_side(10, "orchestrator", sides)
    assert not run.finish_checkpoint_side(15, "trainer", sides)
    assert run.latest_checkpoint() == 10


def test_the_lost_future_is_dropped_and_the_past_is_kept(tmp_path: Path) -> None:
    run = RunDir(tmp_path).phase("warmup")
    for step in (9, 10, 11):
        for folder, marker in ((run.weights_step(step), STABLE), (run.checkpoint(step), COMPLETE)):
            folder.mkdir(parents=True)
            (folder / marker).touch()
    (run.weights / "step_12.tmp").mkdir()
    run.delete_after(10)
    assert run.stable_weights() == [9, 10] and run.complete_checkpoints() == [9, 10]
    assert not (run.weights / "step_12.tmp").exists()


def test_a_deletion_that_was_interrupted_by_a_kill_is_completed_by_the_next_incarnation(
    tmp_path: Path,
) -> None:
    """A marker goes first, and the big files after it may stay when SIGKILL comes between."""
    run = RunDir(tmp_path)
    for folder in (run.checkpoint_side(8, "trainer"), run.weights_step(8)):
        folder.mkdir(parents=True)
        (folder / "shard").touch()
    run.finish_checkpoint_side(9, "trainer", ("trainer",))
    run.delete_after(9)
    assert run.complete_checkpoints() == [9]
    assert not list(tmp_path.rglob("shard"))


def test_a_later_version_with_a_reader_loses_only_its_marker(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (11, 12):
        for folder in (run.weights_step(step), run.delta_step(step), run.rollouts_step(step)):
            folder.mkdir(parents=True)
            (folder / "data").touch()
            (folder / STABLE).touch()
    leases = [run.lease(folder, "inference-0") for folder in (run.weights_step(12), run.delta_step(11))]
    run.delete_after(10)
    assert run.stable_weights() == [] == run.list_steps(run.deltas, STABLE)
    assert sorted(tmp_path.rglob("data")) == [run.delta_step(11) / "data", run.weights_step(12) / "data"]
    run.delete_dropped(run.weights)
    assert (run.weights_step(12) / "data").exists()
    for lease in leases:
        lease.unlink()
    run.delete_dropped(run.weights)
    assert not run.weights_step(12).exists() and run.delta_step(11).exists()
    run.delete_after(10)
    assert not run.delta_step(11).exists()


def test_a_lease_is_renewed_until_it_is_given_back_and_never_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    monkeypatch.setattr("primerl_hpc.run.leases.LEASE_REFRESH_S", 0.01)
    path = run.lease(run.weights_step(3), "inference-0")
    held = HeldLease(path)
    os.utime(path, (0, 0))
    wait_until(lambda: path.stat().st_mtime > 0, what="the renewal", timeout_s=PATIENCE_S)
    held.release()
    held.thread.join(PATIENCE_S)
    assert not held.thread.is_alive() and not path.exists()
    renew_lease(path)
    assert not path.exists()


def test_a_lease_holds_until_it_is_given_back_or_old(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    lease = run.lease(run.weights_step(3), "inference-0")
    assert run.has_lease(run.weights_step(3)) and not run.has_lease(run.weights_step(30))
    os.utime(lease, (0, 0))
    assert not run.has_lease(run.weights_step(3)) and not lease.exists()


def test_endpoints_are_found_by_process_and_by_role(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    publish_endpoint(run, "inference-0", "http://a:1", model="m")
    publish_endpoint(run, "inference-1", "http://a:2")
    endpoint = read_endpoint(run, "inference-0")
    assert endpoint is not None and endpoint["url"] == "http://a:1" and endpoint["model"] == "m"
    assert set(read_endpoints(run, "inference")) == {"inference-0", "inference-1"}
    assert read_endpoint(run, "router-0") is None


def test_the_api_key_is_private_and_stays_the_same(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    key = run_keys(run).api_key
    assert len(key) > 30 and run_keys(run).api_key == key
    keys = run.keys(1)
    assert keys.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in keys.iterdir()} == {0o600}


def test_a_second_supervisor_is_refused_and_a_dead_ones_lock_is_taken(tmp_path: Path) -> None:
    lock = SupervisorLock(tmp_path / "control" / "supervisor.lock")
    lock.acquire()
    with pytest.raises(OccupiedError, match=f"pid {os.getpid()}"):
        SupervisorLock(lock.path).acquire()
    owner = json.loads(lock.path.read_text())
    dead = subprocess.Popen(["true"])
    dead.wait()
    lock.path.write_text(json.dumps({**owner, "pid": dead.pid}))
    SupervisorLock(lock.path).acquire()
    # a pid that was used again is not the old process
    lock.path.write_text(json.dumps({**owner, "started": "1"}))
    SupervisorLock(lock.path).acquire()


@pytest.mark.parametrize(
    ("squeue", "is_over"),
    [
        (printed(queue_row("3", "RUNNING", listed="1_3"), queue_row("1", "RUNNING", listed="1_4")), False),
        (printed(queue_row("3", "COMPLETED", listed="1_3"), queue_row("1", "RUNNING", listed="1_4")), True),
        ("exit 0", False),
        (UNKNOWN_JOB, True),
    ],
    ids=["its task of an array runs", "its task has ended", "not listed", "unknown"],
)
def test_the_lock_of_a_job_is_broken_only_if_slurm_reports_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, is_over: bool
) -> None:
    for name, body in (("squeue", squeue), ("sacct", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    lock = SupervisorLock(tmp_path / "control" / "supervisor.lock")
    files.write_json(lock.path, {**lock.identity, "host": "n7", "job": "3"})
    if is_over:
        lock.acquire()
        return
    with pytest.raises(OccupiedError, match="on n7"):
        lock.acquire()


def test_a_lock_is_renewed_only_by_its_owner(tmp_path: Path) -> None:
    lock = SupervisorLock(tmp_path / "supervisor.lock")
    lock.acquire()
    os.utime(lock.path, (1, 1))
    assert lock.touch() and lock.path.stat().st_mtime > 1
    lock.path.write_text("")  # another supervisor has created it and not written it yet
    assert lock.touch()
    lock.path.write_text(json.dumps({**lock.identity, "host": "n7"}))
    os.utime(lock.path, (1, 1))
    assert not lock.touch() and lock.path.stat().st_mtime == 1
    lock.path.unlink()
    assert lock.touch() and not lock.path.exists()


@pytest.mark.parametrize("has_links", [True, False])
def test_of_two_supervisors_that_start_at_once_one_gets_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    """The second one looks when the first has opened its file and not written it yet."""
    path, write, held = tmp_path / "supervisor.lock", os.write, []

    def start(name: str) -> None:
        with contextlib.suppress(OccupiedError):
            SupervisorLock(path).acquire()
            held.append(name)

    def second_comes_first(*args: Any) -> Any:
        if has_links or path.exists():
            monkeypatch.setattr(os, "write", write)
            start("second")
        return write(*args)

    def refuse(*args: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "no hard links")

    monkeypatch.setattr(os, "write", second_comes_first)
    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    start("first")
    assert held == ["second" if has_links else "first"]
    assert os.listdir(tmp_path) == ["supervisor.lock"] and json.loads(path.read_text())["pid"] == os.getpid()


def test_a_lock_that_is_given_back_while_it_is_read_goes_to_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes when we look for its owner. Where we look again, another supervisor takes it right after that."""
    path, open_, held = tmp_path / "supervisor.lock", os.open, []
    SupervisorLock(path).acquire()

    def take() -> None:
        monkeypatch.setattr(os, "open", open_)
        SupervisorLock(path).acquire()
        held.append("another")

    moments = [path.unlink, take]

    def read(opened: Path, flags: int, *mode: int) -> int:
        if opened == path and flags == os.O_RDONLY:
            moments.pop(0)()
            raise FileNotFoundError
        return open_(opened, flags, *mode)

    monkeypatch.setattr(os, "open", read)
    with contextlib.suppress(OccupiedError):
        SupervisorLock(path).acquire()
        held.append("we")
    assert len(held) == 1


def test_an_exclusive_file_that_is_there_needs_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert files.create_exclusive(tmp_path / "x", "first")

    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(os, "fsync", refuse)
    assert not files.create_exclusive(tmp_path / "x", "second")
    with pytest.raises(OSError, match="disk full"):
        files.create_exclusive(tmp_path / "y", "third")
    assert os.listdir(tmp_path) == ["x"]


def test_a_lock_that_is_stale_by_clocks_alone_is_kept_by_the_process_that_touches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the owner's host is hours behind ours."""
    lock = SupervisorLock(tmp_path / "supervisor.lock")
    lock.path.write_text(json.dumps({**lock.identity, "host": "n7"}))
    os.utime(lock.path, (1, 1))
    ended = threading.Event()

    def live() -> None:
        tick = 1
        while not ended.wait(0.1):
            tick += 1
            os.utime(lock.path, (tick, tick))

    owner = threading.Thread(target=live)
    owner.start()
    try:
        with pytest.raises(OccupiedError, match="n7"):
            lock.acquire()
    finally:
        ended.set()
        owner.join()
    monkeypatch.setattr("primerl_hpc.run.lock.WATCH_S", 0.5)
    lock.acquire()
    assert json.loads(lock.path.read_text()) == lock.identity


def test_damaged_json_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(DataError, match=r"plan\.json"):
        files.read_json(tmp_path / "plan.json")


def test_runs_are_found_by_path_name_and_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("alpha-001", "alpha-002", "beta-001"):
        run = RunDir(tmp_path / name)
        files.write_json(run.plan, {})
        register_run(run)
    assert find_run(str(tmp_path / "beta-001")).root == tmp_path / "beta-001"
    assert find_run("beta").root.name == "beta-001"
    assert find_run("alpha-002").root.name == "alpha-002"
    other = RunDir(tmp_path / "elsewhere" / "runs" / "beta-001")
    files.write_json(other.plan, {})
    register_run(other)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert find_run("beta-001").root == other.root
    with pytest.raises(NotFoundError, match="matches 2 runs"):
        find_run("alpha")
    with pytest.raises(NotFoundError, match="no run named"):
        find_run("gamma")
