"""tests/support/two_phases.py, which decides whether tools/test passes, on small suites with every kind of failure."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from tests.support.helpers import PATIENCE_S, ROOT, is_alive, wait_for
from tests.support.two_phases import delete_shared_memory, shared_memory_names

ONCE = """
import os, signal, subprocess, sys, threading
from pathlib import Path
import pytest

def is_first_call(name):
    mark = Path(__file__).with_name(name)
    is_first = not mark.exists()
    mark.touch()
    return is_first
"""
PASSES = "\ndef test_passes():\n    pass\n"
FAILS_ONCE = "\ndef test_fails_once():\n    assert not is_first_call('once'), 'the first call'\n"
FAILS = "\ndef test_fails():\n    assert 1 == 2\n"
KILLS = "\ndef test_kills_its_worker():\n    if is_first_call('kill'): os.kill(os.getpid(), signal.SIGKILL)\n"
HANGS = (
    "\n@pytest.mark.timeout(1)\ndef test_hangs():\n    if is_first_call('hang'): threading.Event().wait()\n"
)
QUARANTINED = "\n@pytest.mark.quarantine('a reason')\ndef test_is_known_to_fail():\n    assert 1 == 2\n"
LEAVES = """
def test_leaves_a_process():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)"], start_new_session=True)
    Path(__file__).with_name("left").touch()
"""
LEAVES_MEMORY = """
def test_leaves_shared_memory():
    name = Path("/dev/shm", "test_two_phases_" + str(os.getpid()))
    name.touch()
    Path(__file__).with_name("left").write_text(str(name))
"""
FIXTURE_FAILS = """
@pytest.fixture(scope="module")
def shared():
    assert not ALWAYS and "PYTEST_XDIST_WORKER" not in os.environ, "the fixture"
"""
SHARES = "\ndef test_shares(shared):\n    pass\n"
WAITS = "\ndef test_waits():\n    Path(__file__).with_name('waits').touch(); threading.Event().wait()\n"


def start(folder: Path, *tests: str, most: int = 15) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = -q -p no:cacheprovider -p xdist.plugin -p pytest_timeout\n"
    )
    (folder / "test_small.py").write_text(ONCE + "".join(tests))
    words = ("--workers", "2", "--most", str(most), "--", "test_small.py")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.two_phases", *words],
        cwd=folder,
        # without hypothesis and others, whose import takes longer than these suites
        env={**environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(folder: Path, *tests: str, most: int = 15) -> tuple[int, list[str]]:
    process = start(folder, *tests, most=most)
    printed, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, printed.splitlines()


def reported(lines: list[str], word: str) -> list[str]:
    return [line.split("::")[1] for line in lines if line.startswith(f"{word} ") and "::" in line]


def test_what_passes_alone_is_flaky_and_does_not_fail_the_run(tmp_path: Path) -> None:
    status, lines = run(tmp_path / "suite", PASSES, FAILS_ONCE, HANGS)
    assert status == 0, "\n".join(lines)
    flaky = reported(lines, "FLAKY")
    assert flaky[0] == "test_fails_once: AssertionError: the first call" and flaky[1].startswith(
        "test_hangs: "
    )
    assert lines[-2] == "two_phases: 3 passed or skipped, 0 failed, 2 flaky in 3 tests"


BUSY = """
def test_is_busy():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.6: pass"])
"""


def test_the_cost_of_each_test_is_printed_and_kept(tmp_path: Path) -> None:
    _, lines = run(tmp_path / "suite", PASSES, BUSY)
    costs = json.loads((tmp_path / "suite" / "build" / "durations.json").read_text())
    worker, start_s, wall_s, cpu_s = costs["test_small.py::test_is_busy"]
    assert worker in ("gw0", "gw1") and 0 < wall_s < start_s and cpu_s >= 0.5  # with its child
    assert costs["test_small.py::test_passes"][-1] < 0.5
    assert any(re.fullmatch(r" +\d+\.\d +\d+\.\d +2  test_small.py", line) for line in lines)


def test_what_fails_twice_fails_the_run(tmp_path: Path) -> None:
    status, lines = run(tmp_path / "suite", PASSES, FAILS, FAILS_ONCE)
    assert status == 1, "\n".join(lines)
    assert "test_fails: assert 1 == 2" in reported(lines, "FAILED")
    assert lines[-2] == "two_phases: 2 passed or skipped, 1 failed, 1 flaky in 3 tests"


def test_tests_that_a_dead_worker_left_behind_are_run(tmp_path: Path) -> None:
    status, lines = run(
        tmp_path / "suite", KILLS, *(PASSES.replace("passes", f"passes_{n}") for n in range(9))
    )
    assert status == 0, "\n".join(lines)
    assert [name.partition(":")[0] for name in reported(lines, "FLAKY")] == ["test_kills_its_worker"]
    assert lines[-2] == "two_phases: 10 passed or skipped, 0 failed, 1 flaky in 10 tests"


def test_a_test_that_always_kills_its_process_fails_the_run(tmp_path: Path) -> None:
    status, lines = run(tmp_path / "suite", PASSES, KILLS.replace("if is_first_call('kill'): ", ""))
    assert status == 1 and any("before its end" in line for line in lines)


def test_many_failures_are_not_run_again(tmp_path: Path) -> None:
    status, lines = run(
        tmp_path / "suite", *(FAILS_ONCE.replace("once", f"once_{n}") for n in range(3)), most=2
    )
    assert status == 1 and len(reported(lines, "FAILED")) >= 3
    assert "two_phases: 3 tests failed, more than 2: none is run again" in lines


@pytest.mark.parametrize("always", [False, True])
def test_tests_that_share_a_failed_fixture_are_one_failure(tmp_path: Path, always: bool) -> None:
    tests = [SHARES.replace("shares", f"shares_{n}") for n in range(3)]
    status, lines = run(tmp_path / "suite", f"\nALWAYS = {always}\n", FIXTURE_FAILS, *tests, most=2)
    assert status == always, "\n".join(lines)
    (line,) = reported(lines, "FAILED" if always else "FLAKY")
    assert line.endswith(" and 2 more of the module: AssertionError: the fixture")
    assert f"{3 * always} failed, {3 * (not always)} flaky in 3 tests" in lines[-2]


def test_a_module_that_cannot_be_imported_fails_the_run(tmp_path: Path) -> None:
    status, lines = run(tmp_path / "suite", PASSES, "\nimport no_such_module\n")
    assert status == 1 and any(line.startswith("BROKEN ") and "no_such_module" in line for line in lines)


def test_a_quarantined_test_is_reported_and_does_not_decide(tmp_path: Path) -> None:
    status, lines = run(tmp_path / "suite", PASSES, QUARANTINED)
    assert status == 0 and reported(lines, "QUARANTINED") == ["test_is_known_to_fail: assert 1 == 2"]


def test_at_most_ten_tests_are_in_quarantine_each_with_a_cause() -> None:
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    marks = [cause for text in sources for cause in re.findall(r"mark\.quarantine\b(\(.*)?", text)]
    assert len(marks) <= 10 and all(re.match(r"""\(["']\w""", cause) for cause in marks)


def test_processes_that_a_test_left_are_ended_and_named(tmp_path: Path) -> None:
    status, lines = run(tmp_path / "suite", LEAVES)
    assert status == 0, "\n".join(lines)
    (line,) = [line for line in lines if "ending what a test left" in line]
    pid = int(line.partition("left: ")[2].split()[0])
    assert "time.sleep(900)" in line and not psutil.pid_exists(pid)


def test_shared_memory_that_a_test_left_is_deleted(tmp_path: Path) -> None:
    status, lines = run(tmp_path / "suite", LEAVES_MEMORY)
    assert status == 0, "\n".join(lines)
    left = Path((tmp_path / "suite" / "left").read_text())
    assert any(line.endswith(f"that a test left: {left.name}") for line in lines) and not left.exists()


def test_shared_memory_that_a_process_uses_is_not_deleted() -> None:
    used = SharedMemory(create=True, size=4096)
    try:
        delete_shared_memory(shared_memory_names() - {used.name})
        assert used.name in shared_memory_names()
    finally:
        used.close()
        used.unlink()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_everything_that_it_started(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path / "suite", LEAVES, WAITS)
    wait_for((tmp_path / "suite" / "waits").exists, "the test that waits")
    wait_for((tmp_path / "suite" / "left").exists, "the process that is left")
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and f"interrupted by {number.name}" in printed
    assert len(started) >= 3 and not any(map(is_alive, started))
