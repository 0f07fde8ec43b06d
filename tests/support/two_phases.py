"""Run pytest on several workers, then run alone what failed or did not run, and decide by both.

    python -m tests.support.two_phases --workers 4 -- tests

Phase 1 is the complete suite on N workers. Phase 2 runs, in one process with no other test at the same time, the
tests that failed in phase 1 and those that a dead worker left behind. A test that passes in phase 2 is printed as
FLAKY with the first line of its error and does not fail the run. The run fails if a test fails twice, if phase 1 had
more than --most failures, if pytest itself fails (collection, usage), or if a collected test ran in neither phase.
Tests of a module whose setup failed with one error are one failure: that of the fixture they share. A test with the
marker ``quarantine`` runs, is reported, and does not decide.

Processes that tests leave behind are ended at the end, also after Ctrl-C or SIGTERM, and their command lines printed.
Shared memory that tests leave behind (of killed processes) is deleted, and its names printed.

The module is also the pytest plugin that records the outcomes as JSON in the file $TWO_PHASES_OUTCOMES. The costs of
phase 1 are printed and kept in build/durations.json (tests/support/durations.py).
Exit status: 0 passed, 1 failed, 2 pytest could not run, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import durations

OUTCOMES = "TWO_PHASES_OUTCOMES"
QUARANTINE = "quarantine"
LEAST_DISK_GIB = 10
GRACE_S = 10.0
"""Time for pytest to end after an interrupt, and for leftover processes to end after SIGTERM."""
INTERRUPTED = 130
SHARED_MEMORY = Path("/dev/shm")
_PR_SET_CHILD_SUBREAPER = 36


# -- the plugin --------------------------------------------------------------------------------------


def first_line(report: Any) -> str:
    text = getattr(getattr(report.longrepr, "reprcrash", None), "message", "") or str(report.longrepr)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line[1:].strip() for line in lines if line.startswith("E ")] or lines
    return lines[0][:300] if lines else "no message"


@dataclass
class Outcomes:
    """The view of pytest's controlling process; ``failed`` and ``broken``: test or module → first line of its error."""

    collected: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    failed_in_setup: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    costs: dict[str, durations.Cost] = field(default_factory=dict)


class Recorder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen = Outcomes()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self.seen.collected = list(ids)

    def pytest_collection_finish(self, session: Any) -> None:
        if session.items:
            self.seen.collected = [item.nodeid for item in session.items]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.seen.broken[report.nodeid] = first_line(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.seen.failed.setdefault(report.nodeid, first_line(report))
            if report.when == "setup":
                self.seen.failed_in_setup.append(report.nodeid)
            if QUARANTINE in getattr(report, "keywords", {}):
                self.seen.quarantined.append(report.nodeid)
        if report.when == "teardown":
            self.seen.finished.append(report.nodeid)
            self.seen.costs[report.nodeid] = report.cost

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(vars(self.seen)))


def pytest_configure(config: Any) -> None:
    config.addinivalue_line("markers", f"{QUARANTINE}(cause): runs and is reported, but does not decide")
    config.pluginmanager.register(durations)
    path = os.environ.get(OUTCOMES)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(path)), "two_phases_recorder")


# -- the command -------------------------------------------------------------------------------------


class Interrupted(Exception):
    """The run received SIGINT or SIGTERM."""


def describe_machine() -> str:
    memory, shared = psutil.virtual_memory(), shutil.disk_usage("/dev/shm")
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"machine: {os.cpu_count()} cores, load {load}, "
        f"memory {memory.available >> 30} of {memory.total >> 30} GiB free, "
        f"disk {free_disk_gib():.0f} GiB free, /dev/shm {shared.free >> 20} of {shared.total >> 20} MiB free"
    )


def free_disk_gib() -> float:
    return shutil.disk_usage(tempfile.gettempdir()).free / 2**30


def adopt_orphans() -> None:
    """Make processes whose parent has ended children of this process, so that it can end them (Linux, prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def wait_and_reap(process: subprocess.Popen[bytes]) -> int:
    """Wait for ``process``; collect adopted processes that end meanwhile, which would remain as zombies otherwise."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode


def run_pytest(arguments: list[str], path: Path) -> tuple[int, Outcomes | None]:
    """Run pytest; return its exit status and the outcomes, None if it ended before it wrote them."""
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.two_phases", *arguments]
    process = subprocess.Popen(command, env=os.environ | {OUTCOMES: str(path)})
    try:
        status = wait_and_reap(process)
    except Interrupted as interrupt:
        signal.alarm(int(GRACE_S))  # SIGALRM interrupts the wait below
        if interrupt.args != ("SIGINT",):  # a terminal has sent that to pytest as well
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(Interrupted):
            wait_and_reap(process)
        raise
    finally:
        end_leftovers()
    return status, Outcomes(**json.loads(path.read_text())) if path.exists() else None


def end_leftovers() -> None:
    """End every descendant of this process and print its command line."""
    signal.alarm(0)
    if left := descendants():
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                print(
                    f"two_phases: ending what a test left: {process.pid} {' '.join(process.cmdline())[:200]}"
                )
                process.terminate()
        sys.stdout.flush()
        psutil.wait_procs(left, timeout=GRACE_S / 2)
    while left := descendants():  # also what was started meanwhile
        for process in left:
            # psutil takes a process for a successor with the same id, and spares it, if the clock was set meanwhile
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        psutil.wait_procs(left, timeout=1.0)


def descendants() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def shared_memory_names() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir() if path.is_file()}


def mapped_names() -> set[str]:
    """Names of shared memory that a process uses, which may belong to another test run."""
    found: set[str] = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it ended, or belongs to another user, as do its segments
            found.update(re.findall(rf"{SHARED_MEMORY}/(\S+)", path.read_text(errors="replace")))
    return found


def delete_shared_memory(before: set[str]) -> None:
    """Delete names that are not in ``before`` and that no process maps.

    A process that starts maps its memory a moment after it has created the name, so a second check follows after 1 s.
    """
    left = shared_memory_names() - before - mapped_names()
    if left:
        time.sleep(1.0)
        left -= mapped_names()
    for name in sorted(left):
        with contextlib.suppress(OSError):  # another user's
            (SHARED_MEMORY / name).unlink()
            print(f"two_phases: deleting the shared memory that a test left: {name}", flush=True)


def by_cause(failed: dict[str, str], in_setup: list[str]) -> dict[str, str]:
    """Return ``failed`` with one entry for all tests of a module whose setup failed with the same error."""
    shared: dict[tuple[str, str], list[str]] = {}
    for name, error in failed.items():
        cause = name.partition("::")[0] if name in in_setup else name
        shared.setdefault((cause, error), []).append(name)
    return {
        names[0] + (f" and {len(names) - 1} more of the module" if names[1:] else ""): error
        for (_, error), names in shared.items()
    }


def judge(workers: int, most: int, arguments: list[str], path: Path) -> int:
    status, first = run_pytest(
        ["--numprocesses", str(workers), "--max-worker-restart", "0", *arguments], path
    )
    if first is None or not (first.collected or first.broken):
        print(f"two_phases: pytest ended with {status} before a test ran", flush=True)
        return 2
    durations.write(first.costs)
    print("\n".join(durations.table(first.costs)), flush=True)
    if first.broken:
        for name, error in first.broken.items():
            print(f"BROKEN {name}: {error}")
        return 1
    failed = {name: error for name, error in first.failed.items() if name not in first.quarantined}
    missing = sorted(set(first.collected) - set(first.finished) - set(failed))
    if status not in (0, 1, 2):  # 2: interrupted, as by a worker that died
        print(f"two_phases: pytest ended with {status}", flush=True)
        return 2
    in_setup = first.failed_in_setup
    num_causes = len(by_cause(failed, in_setup))
    again, bad = [*failed, *missing], {}
    if num_causes > most:
        print(f"two_phases: {num_causes} tests failed, more than {most}: none is run again")
        again, bad = [], dict(failed)
    if again:
        print(f"\ntwo_phases: {len(again)} tests are run again, alone", flush=True)
        status, second = run_pytest(["-p", "no:xdist", "-ra", *again], path)
        if second is None:
            print(f"two_phases: the second run ended with {status} before its end", flush=True)
            return 1
        in_setup = [*in_setup, *second.failed_in_setup]
        unrun = {name: "did not run" for name in again if name not in second.finished}
        bad = {
            name: error for name, error in (unrun | second.failed).items() if name not in second.quarantined
        }
    print()
    for name in first.quarantined:
        print(f"QUARANTINED {name}: {first.failed[name]}")
    flaky = {name: error for name, error in failed.items() if name not in bad}
    for word, named in (("FLAKY", flaky), ("FAILED", bad)):
        for name, error in sorted(by_cause(named, in_setup).items()):
            print(f"{word} {name}: {error}")
    num_flaky, total = len(flaky), len(first.collected)
    print(
        f"two_phases: {total - len(bad)} passed or skipped, {len(bad)} failed, {num_flaky} flaky in {total} tests"
    )
    return 1 if bad else 0


def raise_interrupted(number: int, _frame: object) -> None:
    raise Interrupted(signal.Signals(number).name)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--most", type=int, default=15, help="failures of phase 1 that phase 2 may clear")
    parser.add_argument("arguments", nargs="*", help="arguments of pytest, after --")
    chosen = parser.parse_args()
    print(describe_machine(), flush=True)
    if free_disk_gib() < LEAST_DISK_GIB:
        print(
            f"error: the tests need {LEAST_DISK_GIB} GiB of free disk in {tempfile.gettempdir()}",
            file=sys.stderr,
        )
        return 2
    adopt_orphans()
    before = shared_memory_names()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, raise_interrupted)
    try:
        with tempfile.TemporaryDirectory(prefix="two-phases-") as folder:
            return judge(chosen.workers, chosen.most, chosen.arguments, Path(folder) / "outcomes.json")
    except Interrupted as signal_name:
        print(f"two_phases: interrupted by {signal_name}", flush=True)
        return INTERRUPTED
    finally:
        delete_shared_memory(before)
        print(describe_machine(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
