"""control/failure.json: the root-cause failure of a run, recorded once, before other processes are terminated.

One fault has many consequences: a rank dies, its peers lose their connections, torchrun exits with code 1. `find_cause`
defines which source of evidence takes precedence.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import ConfigError, ExitCode
from primerl_hpc.common.files import names_in, read_json_or_none, write_json
from primerl_hpc.common.safety.error_text import MAX_CHARS, cut_middle, last_error, without_native_frames
from primerl_hpc.plan.plan import ProcessPlan
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.step import ExitStatus, Launch

LAST_LINES = 40
REPORT_LINES = 2000
"""torchrun's report contains the traceback of every rank that raised."""
TORCHRUN_ERROR = "error.json"
_RANK_FAILURE = re.compile(
    r"rank\s{0,40}:\s{0,40}(\d{1,9}) \(local_rank.{0,200}?exitcode\s{0,40}:\s{0,40}(-?\d{1,9}) \(pid: (\d{1,9})\)",
    re.S,
)
_ENDED_BY_TORCHRUN = re.compile(r"(?:Sending|Unable to shutdown) process (\d{1,9}) ")
_SECONDARY_SIGNALS = ("SIGABRT", "SIGTERM")
"""Signals of ranks that end because a peer failed (NCCL's watchdog aborts) or because torchrun terminated them."""
_EXTERNAL = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
"""Signals that are sent from outside the process."""
_OOM = re.compile(
    r"^(?:guard: (out of memory: .+)|slurmstepd: error: (.*oom[_-]kill.*)|srun: error: (.*Out Of Memory.*))$"
)
"""Lines of the guard, slurmstepd and srun that prove an out-of-memory kill."""
_SCRIPT_LINE = re.compile(r"^\S+: line \d+: ")
"""Prefix of bash's own messages; SLURM runs a copy of the script, whose name is meaningless to users."""


def describe_failure(
    launch: Launch, status: ExitStatus, reason: str, host: str, written: Mapping[Path, int] | None = None
) -> dict[str, Any]:
    """Return the content of failure.json for a process that ended with ``status``.

    ``written``: sizes of its logs in bytes when this incarnation started; earlier content is ignored.
    """
    process, run, written = launch.process, launch.run_dir, written or {}
    log = status.log or launch.log
    lines = last_lines(log, written.get(log, 0), count=REPORT_LINES)
    scheduler_lines = last_lines(launch.scheduler_log, written.get(launch.scheduler_log, 0))
    lines = lines or scheduler_lines
    evidence = oom_evidence([*lines, *scheduler_lines])
    cause = find_cause(
        lines,
        evidence=evidence,
        reported=read_json_or_none(run.error(process.name)),
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
        "out_of_memory": evidence if cause.signal == "SIGKILL" else None,
        "reason": reason,
        "message": cause.message,
        "log": str(log),
        "last_lines": lines[-LAST_LINES:],
    }


@dataclass(frozen=True)
class FailureOrigin:
    """Where a failure happened."""

    attempt: int
    phase: str | None
    process: str
    node: str


def supervisor_failure(
    origin: FailureOrigin, *, exit_code: int, reason: str, message: str, log: Path | None = None
) -> dict[str, Any]:
    """Return the content of failure.json for a failure outside the processes of the plan."""
    return {
        "time": round(time.time(), 3),
        "attempt": origin.attempt,
        "phase": origin.phase,
        "role": "supervisor",
        "process": origin.process,
        "node": origin.node,
        "rank": None,
        "exit_code": int(exit_code),
        "signal": None,
        "reason": reason,
        "message": message,
        "log": str(log or ""),
        "last_lines": last_lines(log) if log else [],
    }


def setup_fault(status: str, line: str, output: str) -> ConfigError:
    """Return the error for a failed setup line of the batch script, which ended with exit status ``status``.

    ``output``: its stderr, whose last line is taken as the reason.
    """
    lines = [text.strip() for text in output.splitlines() if text.strip()]
    reason = f": {_SCRIPT_LINE.sub('', lines[-1])}" if lines else ""
    return ConfigError(
        f"a setup line of the batch script failed with exit status {status}: {' '.join(line.split())}{reason}",
        hint="fix it in software.modules or software.setup of the profile, or mark it there with optional: true",
    )


@dataclass(frozen=True)
class Cause:
    rank: int | None
    exit_code: int | None
    signal: str | None
    message: str


def oom_evidence(lines: list[str]) -> str | None:
    """Return the line that proves an out-of-memory kill by the kernel, without its ``guard:`` or ``srun:`` prefix."""
    for line in reversed(lines):
        if match := _OOM.match(line.strip()):
            return next(filter(None, match.groups()))
    return None


def fault_cause(failure: Mapping[str, Any]) -> str:
    """Return a signature of the failure: how the process ended, and its message without variable parts.

    Words that contain a digit (ports, process ids, addresses, times) differ between occurrences of the same failure.
    """
    ended = failure["signal"] or f"exit code {failure['exit_code']}"
    ended = "it hung" if failure.get("was_ended_by_us") else ended
    return f"{ended}: " + re.sub(r"\w*\d\w*", "#", str(failure["message"]))


def is_killed_from_outside(failure: Mapping[str, Any]) -> bool:
    """True if the process was killed externally: not by us for a hang, nor by the kernel for lack of memory."""
    is_ours = failure.get("was_ended_by_us") or failure.get("out_of_memory")
    return failure["signal"] in _EXTERNAL and not is_ours


def find_cause(
    lines: list[str],
    *,
    reported: dict[str, Any] | None,
    raised: dict[str, Any] | None,
    status: ExitStatus,
    evidence: str | None = None,
) -> Cause:
    """Return the root cause from the error file (``reported``), torchrun's error files (``raised``) and the log.

    A killed rank reports nothing, while its peers report a lost connection, so torchrun's record of a killed rank takes
    precedence over their reports. ``evidence``: the line that proves an out-of-memory kill, if there is one.
    """
    first = _torchrun_report(lines)
    if first is not None and first.exit_status.signal is not None:
        rank, how = first.rank, str(first.exit_status)
        return Cause(rank, None, how, f"rank {rank} was {_killed(first.exit_status, evidence)}")
    signal = str(status) if status.signal else None
    exit_code = None if status.signal else status.code
    if reported is not None:
        return Cause(reported.get("rank"), reported.get("exit_code", exit_code), signal, reported["message"])
    if raised is not None:
        return Cause(raised["rank"], exit_code, signal, raised["message"])
    rank = first.rank if first else None
    if status.signal:
        error = last_error(lines)
        is_explained = not error or (evidence is not None and signal == "SIGKILL")
        suffix = "" if is_explained else f"; the last error in its log: {error}"
        return Cause(rank, None, signal, _killed(status, evidence) + suffix)
    last_line = lines[-1].strip() if lines else "its log is empty"
    return Cause(rank, exit_code, signal, last_error(lines) or last_line)


def _killed(status: ExitStatus, evidence: str | None) -> str:
    number, name = status.signal, str(status)
    proof = f"; {evidence}" if evidence and name == "SIGKILL" else ""
    return (
        f"killed by signal {number} ({name}){proof}" if name.startswith("SIG") else f"killed by {name}{proof}"
    )


def effective_code(run: RunDir, process: ProcessPlan, status: ExitStatus) -> int:
    """Return the exit code that counts: torchrun exits with 0 or 1 only, its ranks write outcome and error files."""
    outcome = read_json_or_none(run.outcome(process.name)) or {}
    if status.code == 0 and outcome.get("outcome") == "stopped":
        return ExitCode.STOPPED
    error = read_json_or_none(run.error(process.name)) or {}
    return int(error.get("exit_code", status.code)) if status.code == 1 else status.code


def write_failure(run: RunDir, failure: dict[str, Any]) -> None:
    """Write failure.json unless it already holds a failure of the same attempt: the first one is the root cause."""
    known = read_json_or_none(run.failure)
    if known is None or known.get("attempt") != failure["attempt"]:
        write_json(run.failure, failure)


def delete_earlier_reports(run: RunDir, names: Collection[str]) -> None:
    """Delete what earlier incarnations of these processes reported, or those of an earlier phase."""
    for report in (run.error, run.outcome, run.turn):
        paths = [report(name) for name in names]
        # a listing costs four operations
        present = {path.name for path in paths} if len(paths) < 4 else names_in(paths[0].parent)
        for path in paths:
            if path.name in present:
                path.unlink(missing_ok=True)


def log_sizes(launch: Launch) -> dict[Path, int]:
    """Return the sizes in bytes of a process's logs on every node and of its torchrun error files."""
    paths = [launch.log, launch.scheduler_log, *launch.log.parent.glob(f"{launch.log.stem}_*.log")]
    paths += _error_files(launch)
    return {path: path.stat().st_size for path in paths if path.exists()}


def _error_files(launch: Launch) -> list[Path]:
    """Return the torchrun error files of this process only."""
    folders = [
        launch.run_dir.torchrun_logs(launch.attempt, launch.process.name, node_rank)
        for node_rank in range(len(launch.process.nodes))
    ]
    return [path for folder in folders for path in folder.rglob(TORCHRUN_ERROR)]


def last_lines(log: Path, start: int = 0, count: int = LAST_LINES, tail_bytes: int = 64_000) -> list[str]:
    """Return at most ``count`` non-empty lines from the end of the log, none from before byte ``start``."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(start, file.tell() - tail_bytes))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    lines = without_native_frames(line.rstrip() for line in text.splitlines() if line.strip())
    return [cut_middle(line, MAX_CHARS) for line in lines][-count:]


def _torchrun_error(
    paths: list[Path], ranks_per_node: int, written: Mapping[Path, int]
) -> dict[str, Any] | None:
    """Return the error file with the earliest timestamp: peers of a failed rank fail later, with other messages."""
    earliest: dict[str, Any] | None = None
    for path in paths:
        if path in written:
            continue  # written by an earlier incarnation
        try:
            report = json.loads(path.read_text())["message"]
            message, timestamp = report["message"], int(report["extraInfo"]["timestamp"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if earliest is None or timestamp < earliest["timestamp"]:
            earliest = {"message": message, "timestamp": timestamp, "rank": _rank_of(path, ranks_per_node)}
    return earliest


def _rank_of(path: Path, ranks_per_node: int) -> int | None:
    """``…/node_1/<id>/attempt_0/2/error.json`` with 4 ranks a node → 6: torchrun's folders name the local rank."""
    if not path.parent.name.isdigit():
        return None
    node = re.search(r"/node_(\d+)/", str(path))
    return (int(node[1]) if node else 0) * ranks_per_node + int(path.parent.name)


@dataclass(frozen=True)
class RankFailure:
    rank: int
    exit_status: ExitStatus
    pid: str


def _torchrun_report(lines: list[str]) -> RankFailure | None:
    """Return the rank that failed first according to torchrun's report, and how (-9 for a SIGKILL).

    torchrun's ``Root Cause`` is the failure with the earliest time, in full seconds: for an error the time when it was
    raised, for a kill the time when torchrun noticed it. A peer's error can therefore appear older than the kill that
    caused it, so a rank that was killed, and not by torchrun, takes precedence.
    """
    text = "\n".join(lines)
    report = text.rpartition("Failures:")[2]
    failures = [
        RankFailure(int(rank), ExitStatus(int(code)), pid)
        for rank, code, pid in _RANK_FAILURE.findall(report)
    ]
    ended = set(_ENDED_BY_TORCHRUN.findall(text))
    for failure in failures:
        status = failure.exit_status
        if status.signal is not None and str(status) not in _SECONDARY_SIGNALS and failure.pid not in ended:
            return failure
    return failures[-1] if failures else None  # torchrun prints the root cause last
