"""The first failure, chosen among a dead rank, the errors of its peers, torchrun and the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from primerl_hpc.common.files import write_json, write_text
from primerl_hpc.common.names import Role
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.failures import (
    LAST_LINES,
    describe_failure,
    fault_cause,
    find_cause,
    is_killed_from_outside,
    oom_evidence,
)
from primerl_hpc.runtime.step import ExitStatus, Launch
from primerl_hpc.runtime.steps.oom import counter_file, killed_in_log, read_count
from tests.support.helpers import ROOT, captured, process_plan, wait_for

ECHO = {"rank": 1, "exit_code": 1, "message": "RuntimeError: Connection closed by peer"}
KILLED = """\
============================================================
primerl_hpc.trainer.main FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_05:20:13
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 26296)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_05:20:13
  rank      : 0 (local_rank: 0)
  exitcode  : -9 (pid: 26295)  (SIGKILL)
============================================================
""".splitlines()
RAISED = [line.replace("-9", "1") for line in KILLED]


def test_a_killed_rank_is_blamed_and_not_the_peer_that_reports_it() -> None:
    cause = find_cause(KILLED, reported=ECHO, raised=ECHO, status=ExitStatus(1))
    assert (cause.rank, cause.signal, cause.exit_code) == (0, "SIGKILL", None)


def report(*fallen: tuple[int, int], before: str = "") -> list[str]:
    """torchrun's, of (rank, exit code), whose process ids are 100 + rank; the last is what it calls the root cause."""
    told = [
        f"[{index}]:\n  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: {100 + rank})"
        for index, (rank, code) in enumerate(fallen)
    ]
    others = "\n".join(told[:-1]) or "  <NO_OTHER_FAILURES>"
    return (
        f"{before}\nFailures:\n{others}\n-----\nRoot Cause (first observed failure):\n{told[-1]}".splitlines()
    )


@pytest.mark.parametrize(
    ("lines", "rank", "signal"),
    [
        (report((0, -9), (1, 1)), 0, "SIGKILL"),  # the peer's error is of the second before
        (report((2, 1), (0, -11), (1, 1)), 0, "SIGSEGV"),
        (report((0, -9), (1, 1), before="Unable to shutdown process 100 via SIGTERM"), 1, None),
        (report((0, -15), (1, 1), before="Sending process 100 closing signal SIGTERM"), 1, None),
        (report((0, -6), (1, 1)), 1, None),  # NCCL's watchdog, whose peer has ended
        (report((1, 1)), 1, None),
    ],
)
def test_a_kill_goes_before_the_errors_that_are_its_echo(
    lines: list[str], rank: int, signal: str | None
) -> None:
    cause = find_cause(lines, reported=None, raised=None, status=ExitStatus(1))
    assert (cause.rank, cause.signal) == (rank, signal)


def test_a_report_with_the_tracebacks_of_all_ranks_is_read_completely(tmp_path: Path) -> None:
    launch = Launch(process_plan(Role.TRAINER), RunDir(tmp_path), "main", 1, 0)
    write_text(launch.log, "\n".join([*report((0, -9), (1, 1)), *["    File train.py"] * 100]))
    failure = describe_failure(launch, ExitStatus(1), "ended", "n1")
    assert (failure["rank"], failure["signal"], len(failure["last_lines"])) == (0, "SIGKILL", LAST_LINES)


@pytest.mark.parametrize("whose, message", [("trainer-0", "boom"), ("sft-0", "its own last line")])
def test_an_error_file_explains_its_own_process_only(tmp_path: Path, whose: str, message: str) -> None:
    launch = Launch(process_plan(Role.TRAINER), RunDir(tmp_path), "main", 1, 0)
    write_text(launch.log, "its own last line")
    folder = launch.run_dir.torchrun_logs(1, whose, 0) / "none_x" / "attempt_0" / "0"
    write_json(folder / "error.json", {"message": {"message": "boom", "extraInfo": {"timestamp": "1"}}})
    assert describe_failure(launch, ExitStatus(1), "ended", "n1")["message"] == message


def test_a_ranks_own_message_precedes_torchruns_report() -> None:
    told = {"rank": 1, "exit_code": 65, "message": "row 7 has no answer"}
    cause = find_cause(RAISED, reported=told, raised=ECHO, status=ExitStatus(1))
    assert (cause.rank, cause.exit_code, cause.message) == (1, 65, "row 7 has no answer")


def test_the_earliest_error_file_is_next() -> None:
    cause = find_cause(RAISED, reported=None, raised={"rank": 3, "message": "boom"}, status=ExitStatus(1))
    assert (cause.rank, cause.exit_code, cause.message) == (3, 1, "boom")


def test_without_reports_the_last_line_that_looks_like_an_error_is_the_cause() -> None:
    lines = ["starting", "ValueError: no such thing", "bye"]
    cause = find_cause(lines, reported=None, raised=None, status=ExitStatus(137))
    killed = "killed by signal 9 (SIGKILL)"
    assert (cause.rank, cause.signal) == (None, "SIGKILL")
    assert cause.message == f"{killed}; the last error in its log: ValueError: no such thing"
    assert find_cause(["starting"], reported=None, raised=None, status=ExitStatus(137)).message == killed


GUARD_LINE = "guard: out of memory: the kernel killed a process of this control group 0 s ago (memory.events: oom_kill 1)"  # noqa: E501


@pytest.mark.parametrize(
    "line, evidence",
    [
        (GUARD_LINE, GUARD_LINE.removeprefix("guard: ")),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=17.3", "Detected 1 oom_kill event in"),
        ("srun: error: n1: task 0: Out Of Memory", "n1: task 0: Out Of Memory"),
        ("RuntimeError: CUDA out of memory", None),
        ("the answer of the model is: out of memory", None),
    ],
)
def test_out_of_memory_is_reported_only_with_evidence(
    tmp_path: Path, line: str, evidence: str | None
) -> None:
    launch = Launch(process_plan(Role.TRAINER), RunDir(tmp_path), "main", 1, 0)
    write_text(launch.log, "\n".join([*report((0, -9), (1, 1)), line]))
    failure = describe_failure(launch, ExitStatus(1), "ended", "n1")
    assert failure["message"].startswith("rank 0 was killed by signal 9 (SIGKILL)")
    assert is_killed_from_outside(failure) is (evidence is None)
    if evidence is None:
        assert failure["out_of_memory"] is None and "memory" not in failure["message"]
    else:
        assert evidence in failure["out_of_memory"] and evidence in failure["message"]


def test_the_cause_of_a_fault_has_no_part_that_changes_with_each_incarnation() -> None:
    first, again, other = (
        {"signal": None, "exit_code": 1, "message": message}
        for message in (
            "Connection closed by peer [10.0.0.1]:4711 after 3.2 s",
            "Connection closed by peer [10.0.0.7]:815 after 12.9 s",
            "the loss is a teapot",
        )
    )
    assert fault_cause(first) == fault_cause(again) != fault_cause(other)
    assert fault_cause(first) != fault_cause(first | {"exit_code": 65})
    hung = {"signal": "SIGKILL", "exit_code": None, "message": "no progress", "was_ended_by_us": True}
    assert not is_killed_from_outside(hung) and fault_cause(hung).startswith("it hung")


def test_the_counter_of_a_control_group_is_found_in_both_versions(tmp_path: Path) -> None:
    write_text(tmp_path / "job" / "memory.events", "low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\n")
    path = counter_file("0::/job\n", str(tmp_path))
    assert path is not None and read_count(path) == 1
    write_text(
        tmp_path / "memory" / "step" / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
    )
    path = counter_file("4:memory:/step\n0::/job\n", str(tmp_path))
    assert path is not None and read_count(path) == 3
    assert counter_file("4:memory:/gone\n0::/gone\n", str(tmp_path)) is None


def test_the_kernels_log_is_evidence_for_its_own_process_alone() -> None:
    text = "4,1,2,-;Memory cgroup out of memory: Killed process 41 (python) total-vm:1kB\n"
    assert killed_in_log(text, {41}) == "Killed process 41 (python)"
    assert killed_in_log(text, {40}) is None


ALLOCATE = "kept = []\nwhile True: kept.append(b'x' * 1_000_000)"
JOIN = "import os, sys; open(sys.argv[1] + '/cgroup.procs', 'w').write('0'); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"  # noqa: E501


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of 64 MiB."""
    version_1, version_2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/cgroup.subtree_control")
    parent = version_1 if version_1.is_dir() else version_2.parent
    group = parent / f"primerl-test-{os.getpid()}"
    try:
        group.mkdir()
        names = ("memory.limit_in_bytes",) if version_1.is_dir() else ("memory.max", "memory.swap.max")
        for name in names:
            (group / name).write_text("0" if "swap" in name else str(64 << 20))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    wait_for(lambda: not (group / "cgroup.procs").read_text().strip(), "its processes to end")
    group.rmdir()


def run_in(group: Path, *command: str) -> subprocess.CompletedProcess[str]:
    guard = ("-m", "primerl_hpc.runtime.steps.guard", "--", sys.executable, "-c", *command)
    return captured(
        [sys.executable, "-c", JOIN, str(group), *guard], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


def test_the_guard_reports_that_the_kernel_killed_its_process_for_its_memory(memory_group: Path) -> None:
    done = run_in(memory_group, ALLOCATE)
    assert done.returncode == 137, done.stderr
    assert oom_evidence(done.stderr.splitlines()) is not None, done.stderr


def test_the_guard_of_a_process_that_was_killed_by_hand_does_not_speak_of_memory(memory_group: Path) -> None:
    run_in(memory_group, ALLOCATE)  # an earlier kill in the same group
    done = run_in(memory_group, "import os; os.kill(os.getpid(), 9)")
    assert done.returncode == 137 and oom_evidence(done.stderr.splitlines()) is None


def test_torchrun_finds_a_ranks_error_file_complete_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from primerl_hpc.trainer.main import RankErrors

    path, replace, looks = tmp_path / "error.json", os.replace, []

    def look(source: str | Path, target: str | Path) -> None:
        looks.append((path.exists(), json.loads(Path(source).read_text())["message"]["message"]))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    RankErrors().record_exception(RuntimeError("Connection closed by peer"))
    assert looks == [(False, "RuntimeError: Connection closed by peer")]
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert failure.message["message"] == "RuntimeError: Connection closed by peer" and failure.timestamp > 0
