"""Who fell first: among a dead rank, its complaining peers, torchrun and the exit code, the right witness is believed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from primerl_hpc.common.files import write_json, write_text
from primerl_hpc.common.names import Role
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.runtime.failures import LAST_LINES, describe_failure, find_cause
from primerl_hpc.runtime.steps import ExitStatus, Launch
from tests.support import process_plan

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


def test_a_killed_rank_is_blamed_and_not_the_peer_that_complains() -> None:
    cause = find_cause(KILLED, told=ECHO, raised=ECHO, status=ExitStatus(1))
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
        (report((0, -6), (1, 1)), 1, None),  # NCCL's watchdog, whose peer is gone
        (report((1, 1)), 1, None),
    ],
)
def test_a_kill_goes_before_the_errors_that_are_its_echo(
    lines: list[str], rank: int, signal: str | None
) -> None:
    cause = find_cause(lines, told=None, raised=None, status=ExitStatus(1))
    assert (cause.rank, cause.signal) == (rank, signal)


def test_a_report_with_the_tracebacks_of_all_ranks_is_read_whole(tmp_path: Path) -> None:
    launch = Launch(process_plan(Role.TRAINER), RunDir(tmp_path), "main", 1, 0)
    write_text(launch.log, "\n".join([*report((0, -9), (1, 1)), *["    File train.py"] * 100]))
    failure = describe_failure(launch, ExitStatus(1), "ended", "n1")
    assert (failure["rank"], failure["signal"], len(failure["last_lines"])) == (0, "SIGKILL", LAST_LINES)


@pytest.mark.parametrize("whose, message", [("trainer-0", "boom"), ("sft-0", "its own last line")])
def test_an_error_file_speaks_for_its_own_process_alone(tmp_path: Path, whose: str, message: str) -> None:
    launch = Launch(process_plan(Role.TRAINER), RunDir(tmp_path), "main", 1, 0)
    write_text(launch.log, "its own last line")
    folder = launch.run_dir.torchrun_logs(1, whose, 0) / "none_x" / "attempt_0" / "0"
    write_json(folder / "error.json", {"message": {"message": "boom", "extraInfo": {"timestamp": "1"}}})
    assert describe_failure(launch, ExitStatus(1), "ended", "n1")["message"] == message


def test_a_ranks_own_sentence_comes_before_torchruns_report() -> None:
    told = {"rank": 1, "exit_code": 65, "message": "row 7 has no answer"}
    cause = find_cause(RAISED, told=told, raised=ECHO, status=ExitStatus(1))
    assert (cause.rank, cause.exit_code, cause.message) == (1, 65, "row 7 has no answer")


def test_the_earliest_error_file_is_next() -> None:
    cause = find_cause(RAISED, told=None, raised={"rank": 3, "message": "boom"}, status=ExitStatus(1))
    assert (cause.rank, cause.exit_code, cause.message) == (3, 1, "boom")


def test_without_witnesses_the_last_line_that_looks_like_an_error_is_told() -> None:
    lines = ["starting", "ValueError: no such thing", "bye"]
    cause = find_cause(lines, told=None, raised=None, status=ExitStatus(137))
    assert (cause.rank, cause.signal, cause.message) == (None, "SIGKILL", "ValueError: no such thing")


def test_torchrun_finds_a_ranks_error_file_whole_or_not_at_all(
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
