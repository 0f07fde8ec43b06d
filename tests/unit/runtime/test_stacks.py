"""`stacks` observes healthy processes: it never stops, traces or interrupts them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from primerl_hpc.runtime.steps.stacks import processes_of, stack_of, state_of
from tests.support.helpers import PATIENCE_S, ROOT, wait_for

# the thread that the kernel prefers for a signal waits while another one enters and leaves functions
BUSY = """
import threading
from primerl_hpc.common.log import dump_stacks_on_signal
dump_stacks_on_signal()
def nested(depth):
    return nested(depth - 1) + 1 if depth else len([type("X", (), {"a": index}) for index in range(1)])
def work():
    while True:
        eval(compile("nested(8)", "<x>", "eval"), globals())
        [(lambda x: x)(index) for index in range(20)]
worker = threading.Thread(target=work, daemon=True)
worker.start()
worker.join()
"""
PYTHON = sys.executable
REQUESTS = 5000
PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT = 17, 0x4206, 0x4207
WAIT_ALL_THREADS = 0x40000000


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [PYTHON, "-c", BUSY], env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=log
        )
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def without_py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))


def dump(pid: int) -> tuple[str, str]:
    return stack_of(pid, time.monotonic() + PATIENCE_S)


class Tracer:
    """A debugger: a thread of this process, because only the thread that traces may detach."""

    def __init__(self, pid: int, *, stops: bool) -> None:
        self.pid, self.stops = pid, stops
        self.started, self.ending = threading.Event(), threading.Event()
        self.error = 0
        self.thread = threading.Thread(target=self._trace)

    def __enter__(self) -> Tracer:
        self.thread.start()
        assert self.started.wait(PATIENCE_S) and not self.error, os.strerror(self.error)
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        self.thread.join()

    def _trace(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        if libc.ptrace(PTRACE_SEIZE, self.pid, None, None) != 0:
            self.error = ctypes.get_errno()
        elif self.stops:
            libc.ptrace(PTRACE_INTERRUPT, self.pid, None, None)
            os.waitpid(self.pid, WAIT_ALL_THREADS)
        self.started.set()
        self.ending.wait()
        if not self.stops:
            libc.ptrace(PTRACE_INTERRUPT, self.pid, None, None)
            os.waitpid(self.pid, WAIT_ALL_THREADS)
        libc.ptrace(PTRACE_DETACH, self.pid, None, None)


def num_dumps(tmp_path: Path) -> int:
    return (tmp_path / "log").read_text().count("Current thread")


@pytest.mark.usefixtures("without_py_spy")
def test_a_healthy_process_survives_requests_for_its_stacks(
    busy: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    wait_for(lambda: "written to its log" in dump(busy.pid)[1], "its thread that prints stacks")
    for _ in range(REQUESTS):
        assert "py-spy is not installed" in dump(busy.pid)[1]
    wait_for(lambda: "in work" in (tmp_path / "log").read_text(), "its stacks")
    assert busy.poll() is None and state_of(Path(f"/proc/{busy.pid}")) in "RS"


@pytest.mark.usefixtures("without_py_spy")
def test_a_process_that_is_traced_receives_no_signal(busy: subprocess.Popen[bytes], tmp_path: Path) -> None:
    wait_for(lambda: "written to its log" in dump(busy.pid)[1], "its thread that prints stacks")
    wait_for(lambda: num_dumps(tmp_path) == 1, "its stacks")
    with Tracer(busy.pid, stops=True) as tracer:
        assert f"process {tracer.thread.native_id} traces it" in dump(busy.pid)[1]
        assert state_of(Path(f"/proc/{busy.pid}")) == "t"
    assert "written to its log" in dump(busy.pid)[1]
    wait_for(lambda: num_dumps(tmp_path) == 2, "its stacks after the trace")
    assert busy.poll() is None


@pytest.mark.usefixtures("without_py_spy")
def test_a_process_that_does_not_print_stacks_receives_no_signal() -> None:
    handler = "import signal, time\nsignal.signal(signal.SIGUSR2, lambda *_: exit(3))\nprint(1, flush=True)\n"
    process = subprocess.Popen([PYTHON, "-c", handler + "time.sleep(600)"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline()
        assert dump(process.pid) == ("", "py-spy is not installed (pip install py-spy)")
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(
    shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") is None
    or os.geteuid() != 0,
    reason="needs py-spy and permission to read the memory of processes",
)
def test_stacks_are_read_without_tracing(busy: subprocess.Popen[bytes]) -> None:
    """A process has at most one tracer: py-spy would be refused if it traced."""
    wait_for(lambda: "work" in dump(busy.pid)[0], "its first stack")
    with Tracer(busy.pid, stops=False):
        wait_for(lambda: "work" in dump(busy.pid)[0], "its stack while another program traces it")
    assert busy.poll() is None


def test_steps_and_guards_are_not_listed_as_processes_of_a_role(tmp_path: Path) -> None:
    """srun's command line contains the guard's, and the guard's contains the role's."""
    run_dir = str(tmp_path / "run")
    role = [sys.executable, "-c", "import time; time.sleep(600)", run_dir, "main", "trainer-0"]
    guard = [sys.executable, "-m", "primerl_hpc.runtime.steps.guard", "--", *role]
    as_srun = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", *guard]
    step = subprocess.Popen(as_srun, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True)

    def words() -> list[list[str]]:
        return [Path(f"/proc/{pid}/cmdline").read_text().split("\0")[1:3] for pid in processes_of(run_dir)]

    try:
        wait_for(lambda: words() == [role[1:3]])  # a forked guard becomes the role
        assert list(processes_of(run_dir).values()) == ["trainer-0"]
    finally:
        os.killpg(step.pid, 15)
        step.wait()
