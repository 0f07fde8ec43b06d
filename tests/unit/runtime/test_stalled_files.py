"""A supervisor whose run directory does not respond: signals and exits are handled, writes follow in order."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json, read_jsonl
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.plan.plan import OnExit
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.files import journal as journal_module
from primerl_hpc.runtime.files.journal import Journal
from tests.support.helpers import PATIENCE_S, ROOT, captured, is_alive, wait_for
from tests.unit.runtime.test_supervisor import SERVE, Toy, toy  # noqa: F401 (a fixture)

LIBRARY = ROOT / "tests" / "support" / "stalled_files.c"


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    made = Journal(RunDir(tmp_path / "run"), attempt=1)
    made.state = {"state": "running", "processes": {}}
    return made


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_signals_and_exits_are_handled_while_no_call_in_the_run_directory_returns(
    toy: Toy,  # noqa: F811 the fixture
    tmp_path: Path,
) -> None:
    run, flag, library = toy.run, tmp_path / "stalled", tmp_path / "stalled_files.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, LIBRARY, "-ldl"], check=True)
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART)
    toy.add(Role.TRAINER, SERVE, OnExit.ENDS_PHASE)
    toy.start(LD_PRELOAD=str(library), STALL_FOLDER=str(run.root), STALL_FLAG=str(flag))
    assert toy.supervisor is not None
    try:
        wait_for(lambda: len(toy.events("role_ready")) == 2, "both processes")
        flag.touch()
        psutil.Process(toy.pid_of("inference-0")).kill()
        toy.wait_until_it_says("role_exited process=inference-0")
        assert not toy.events("role_exited")
        flag.unlink()
        wait_for(lambda: len(toy.events("role_ready")) == 3, "its restart after the stall")
        guards = psutil.Process(toy.supervisor.pid).children()
        flag.touch()
        toy.supervisor.send_signal(signal.SIGTERM)
        toy.wait_until_it_says("signal signal=SIGTERM")
        toy.supervisor.send_signal(signal.SIGTERM)
        wait_for(lambda: not any(map(is_alive, guards)), "the end of all processes, in the stall")
    finally:
        flag.unlink(missing_ok=True)
    assert len(guards) == 2 and toy.end() == ExitCode.PREEMPTED
    assert [row["process"] for row in toy.events("role_exited")] == ["inference-0"]
    assert len(toy.events("signal")) == 2 and read_json(run.state)["state"] == RunState.CANCELLED
    assert not run.supervisor_lock.exists()


def test_a_write_that_does_not_return_delays_neither_the_loop_nor_the_end(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "IO_RETRY_LIMIT_S", 0.3)
    returns = threading.Event()
    journal.write(returns.wait)
    journal.record("run_done")
    asyncio.run(journal.settle())
    assert not journal.run_dir.events.exists()
    returns.set()
    journal.catch_up()
    assert [row["event"] for row in read_jsonl(journal.run_dir.events)] == ["run_done"]


def test_states_that_wait_are_written_once_and_none_is_older_than_the_events(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, returns, synced = os.fsync, threading.Event(), []
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), fsync(fd)))
    seen: list[dict] = []
    journal.write(returns.wait)
    for number in range(50):
        journal.set_process(f"inference-{number}", state="starting")
        journal.record("role_started", process=f"inference-{number}")
    journal.write(lambda: seen.append(read_json(journal.run_dir.state)))
    journal.set_state(RunState.STOPPING)
    returns.set()
    journal.catch_up()
    assert len(synced) <= 2 * 2, "two states, a file and its folder each"
    assert seen[0]["state"] == "running" and len(seen[0]["processes"]) == 50
    assert read_json(journal.run_dir.state)["state"] == RunState.STOPPING
    assert len(list(read_jsonl(journal.run_dir.events))) == 50


def test_a_long_series_of_changes_causes_few_writes(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "COALESCE_S", 0.02)
    write, written = journal_module.write_json, []
    monkeypatch.setattr(
        journal_module, "write_json", lambda *args, **more: (written.append(1), write(*args, **more))
    )
    journal.set_state(RunState.RUNNING)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        journal.set_process("inference-0", state="starting")
        journal.record("role_started", process="inference-0")
        time.sleep(0.002)
    journal.catch_up()
    assert len(written) <= 15, "without longer waits it would be 40"


@pytest.mark.parametrize("urgent", ["state", "vital"])
def test_a_change_of_state_or_a_vital_write_ends_the_wait_of_earlier_records(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, urgent: str
) -> None:
    for name in ("COALESCE_S", "MAX_COALESCE_S"):
        monkeypatch.setattr(journal_module, name, 1e6)
    journal.set_state(RunState.RUNNING)
    journal.catch_up()
    journal.set_process("inference-0", state="starting")
    journal.record("role_started", process="inference-0")
    assert journal.is_settled and not read_json(journal.run_dir.state)["processes"]
    if urgent == "state":
        journal.set_state(RunState.STOPPING)
    else:
        journal.forget_endpoints("inference-0")
    assert not journal.is_settled
    wait_for(lambda: not journal._pending, "its writes")
    assert read_json(journal.run_dir.state)["processes"] and list(read_jsonl(journal.run_dir.events))


def test_a_supervisor_that_was_taken_over_writes_nothing_more(journal: Journal) -> None:
    returns = threading.Event()
    journal.write(returns.wait)
    publish_endpoint(journal.run_dir, "router-0", "http://127.0.0.1:1")
    journal.forget_endpoints("router-0")
    journal.record("run_done")
    journal.is_taken_over = True
    returns.set()
    journal.catch_up()
    assert journal.run_dir.endpoint("router-0").exists() and not journal.run_dir.events.exists()


def test_the_exit_of_a_process_does_not_wait_for_a_file_operation() -> None:
    code = """
    import asyncio, time
    from primerl_hpc.common.errors import TimeoutWaitingError
    from primerl_hpc.common.waiting import in_daemon_thread
    try:
        asyncio.run(in_daemon_thread(lambda: time.sleep(600), may_wait=lambda: False))
    except TimeoutWaitingError:
        print("given up")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = captured(command, timeout=PATIENCE_S, check=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("given up\n", "")
