"""control/failure.json: the first fault of a run, told once and whole, before anybody is killed.

A fault has many echoes: a rank dies, its peers lose their connections, torchrun ends with code 1. `find_cause` says in
which order the witnesses are believed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json_or_none, write_json
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.plan.types import ProcessPlan
from primerl_hpc.runtime.steps import ExitStatus, Launch

LAST_LINES = 40
REPORT_LINES = 2000
"""torchrun's report has the traceback of every rank that raised."""
TORCHRUN_ERROR = "error.json"
_FALLEN = re.compile(r"rank\s*:\s*(\d+) \(local_rank.*?exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)", re.S)
_ENDED_BY_TORCHRUN = re.compile(r"(?:Sending|Unable to shutdown) process (\d+) ")
_ECHOES = ("SIGABRT", "SIGTERM")
"""How ranks end whose peer is gone (NCCL's watchdog aborts), and those that are told to."""


def describe_failure(
    launch: Launch, status: ExitStatus, reason: str, host: str, written: Mapping[Path, int] | None = None
) -> dict[str, Any]:
    """The content of failure.json for a process that ended with ``status``.

    ``written``: how long its logs were when this life began; what is before are the words of an earlier one.
    """
    process, run, written = launch.process, launch.run_dir, written or {}
    log = status.log or launch.log
    lines = last_lines(log, written.get(log, 0), count=REPORT_LINES)
    lines = lines or last_lines(launch.scheduler_log, written.get(launch.scheduler_log, 0))
    cause = find_cause(
        lines,
        told=read_json_or_none(run.error(process.name)),
        raised=_torchrun_error(_error_files(launch), max(1, len(process.accelerators)), written),
        status=status,
    )
    return {
        "time": round(time.time(), 3),
        "attempt": launch.attempt,
        "phase": launch.phase,
        "role": process.role.value,
        "process": process.name,
        "node": host,
        "rank": cause.rank,
        "exit_code": cause.exit_code,
        "signal": cause.signal,
        "reason": reason,
        "message": cause.message,
        "log": str(log),
        "last_lines": lines[-LAST_LINES:],
    }


def supervisor_failure(
    *,
    attempt: int,
    phase: str | None,
    process: str,
    node: str,
    exit_code: int,
    reason: str,
    message: str,
    log: Path | None = None,
) -> dict[str, Any]:
    """The content of failure.json for a fault that no process of the plan had."""
    return {
        "time": round(time.time(), 3),
        "attempt": attempt,
        "phase": phase,
        "role": "supervisor",
        "process": process,
        "node": node,
        "rank": None,
        "exit_code": int(exit_code),
        "signal": None,
        "reason": reason,
        "message": message,
        "log": str(log or ""),
        "last_lines": last_lines(log) if log else [],
    }


@dataclass(frozen=True)
class Cause:
    rank: int | None
    exit_code: int | None
    signal: str | None
    message: str


def find_cause(
    lines: list[str], *, told: dict[str, Any] | None, raised: dict[str, Any] | None, status: ExitStatus
) -> Cause:
    """Who fell first, from what the process said (``told``), torchrun's error files (``raised``) and its log.

    A killed rank says nothing; its peers do, about their lost connection: so torchrun's word that a rank was killed
    comes before theirs.
    """
    first = _torchrun_report(lines)
    if first is not None and first.exit_status.signal is not None:
        rank, how = first.rank, str(first.exit_status)
        hint = " (out of memory?)" if how == "SIGKILL" else ""
        return Cause(rank, None, how, f"rank {rank} was killed by {how}{hint}")
    signal = str(status) if status.signal else None
    exit_code = None if status.signal else status.code
    if told is not None:
        return Cause(told.get("rank"), told.get("exit_code", exit_code), signal, told["message"])
    if raised is not None:
        return Cause(raised["rank"], exit_code, signal, raised["message"])
    return Cause(first.rank if first else None, exit_code, signal, _last_words(lines))


def effective_code(run: RunDir, process: ProcessPlan, status: ExitStatus) -> int:
    """torchrun ends with 0 or 1, whatever its ranks say; they leave their own words."""
    outcome = read_json_or_none(run.outcome(process.name)) or {}
    if status.code == 0 and outcome.get("outcome") == "stopped":
        return ExitCode.STOPPED
    error = read_json_or_none(run.error(process.name)) or {}
    return int(error.get("exit_code", status.code)) if status.code == 1 else status.code


def write_failure(run: RunDir, failure: dict[str, Any]) -> None:
    """The first fault stays: a later one of the same attempt does not replace it."""
    known = read_json_or_none(run.failure)
    if known is None or known.get("attempt") != failure["attempt"]:
        write_json(run.failure, failure)


def forget_earlier_words(run: RunDir, process: ProcessPlan) -> None:
    for path in (run.error(process.name), run.outcome(process.name)):
        path.unlink(missing_ok=True)


def log_sizes(launch: Launch) -> dict[Path, int]:
    """Bytes in the logs of a process, of every node of it, and in the error files of torchrun."""
    paths = [launch.log, launch.scheduler_log, *launch.log.parent.glob(f"{launch.log.stem}_*.log")]
    paths += _error_files(launch)
    return {path: path.stat().st_size for path in paths if path.exists()}


def _error_files(launch: Launch) -> list[Path]:
    """Of this process alone: others of the attempt have faults of their own."""
    folders = [
        launch.run_dir.torchrun_logs(launch.attempt, launch.process.name, place)
        for place in range(len(launch.process.nodes))
    ]
    return [path for folder in folders for path in folder.rglob(TORCHRUN_ERROR)]


def last_lines(log: Path, start: int = 0, count: int = LAST_LINES, tail_bytes: int = 64_000) -> list[str]:
    """At most ``count`` of them, none from before byte ``start``."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(start, file.tell() - tail_bytes))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line.rstrip()[:500] for line in text.splitlines() if line.strip()][-count:]


def _torchrun_error(
    paths: list[Path], ranks_per_node: int, written: Mapping[Path, int]
) -> dict[str, Any] | None:
    """The error file with the earliest timestamp: peers of a dead rank fail later, with other words."""
    earliest: dict[str, Any] | None = None
    for path in paths:
        if path in written:
            continue  # of an earlier life
        try:
            said = json.loads(path.read_text())["message"]
            words, stamp = said["message"], int(said["extraInfo"]["timestamp"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if earliest is None or stamp < earliest["timestamp"]:
            earliest = {"message": words, "timestamp": stamp, "rank": _rank_of(path, ranks_per_node)}
    return earliest


def _rank_of(path: Path, ranks_per_node: int) -> int | None:
    """``…/node_1/<id>/attempt_0/2/error.json`` with 4 ranks a node → 6: torchrun counts the ranks of one node."""
    if not path.parent.name.isdigit():
        return None
    node = re.search(r"/node_(\d+)/", str(path))
    return (int(node[1]) if node else 0) * ranks_per_node + int(path.parent.name)


@dataclass(frozen=True)
class Fallen:
    rank: int
    exit_status: ExitStatus
    pid: str


def _torchrun_report(lines: list[str]) -> Fallen | None:
    """The rank that fell first by torchrun's report, and how (-9 for a SIGKILL).

    Its ``Root Cause`` is the earliest time, in whole seconds: of an error, when it was raised, of a kill, when torchrun
    saw it. So the error of a peer may seem to be older than the kill of which it is the echo: a rank that was killed, and
    not by torchrun, goes before.
    """
    text = "\n".join(lines)
    report = text.rpartition("Failures:")[2]
    fallen = [Fallen(int(rank), ExitStatus(int(code)), pid) for rank, code, pid in _FALLEN.findall(report)]
    ended = set(_ENDED_BY_TORCHRUN.findall(text))
    for each in fallen:
        how = each.exit_status
        if how.signal is not None and str(how) not in _ECHOES and each.pid not in ended:
            return each
    return fallen[-1] if fallen else None  # the root cause stands last


def _last_words(lines: list[str]) -> str:
    """The last line that looks like an error, else the last line."""
    for line in reversed(lines):
        if re.search(r"(Error|Exception|refused|failed)\b|error:", line):
            return line.strip()
    return lines[-1].strip() if lines else "it wrote no log"
