"""Who fell first: among a dead rank, its complaining peers, torchrun and the exit code, the right witness is believed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from primerl_hpc.runtime.failures import find_cause
from primerl_hpc.runtime.steps import ExitStatus

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
