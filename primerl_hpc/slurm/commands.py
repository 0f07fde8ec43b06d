"""Run SLURM commands, on an event loop (inside a job) or blocking (on a login node), and classify their replies.

    reply = await run_slurm("scancel", "7")                       # SlurmReply(code, output, errors)
    reply = await retry_slurm("scontrol", "requeue", "7")         # repeated while SLURM does not answer
    text = ask(["squeue", "--noheader"])                          # raises SchedulerError, UnansweredError
    retry_ask(["scancel", "7"], limit_s=120, before_pause=report) # repeated while SLURM does not answer

A command has three outcomes: it succeeded, SLURM refused it, or SLURM did not answer. In the last case the controller
may have done what was requested, so only commands that can be repeated safely are retried.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.common.waiting import Backoff, retry, retry_async
from primerl_hpc.slurm.command_lines import queue_command, rows_of

COMMAND_TIMEOUT_S = 30.0
"""Time limit of one command on a login node."""
ANSWER_S = 10.0
"""Time limit of one command inside a job, where a pending save or a failed process must not wait for SLURM."""
PATIENCE_S = 20.0
"""How long a command inside a job is repeated while SLURM does not answer; less than `walltime.RESERVE_S`."""
FIRST_PAUSE_S, LAST_PAUSE_S, LAST_PAUSE_IN_JOB_S = 1.0, 30.0, 4.0
"""Pauses between two tries: doubled from the first to the last, which is shorter inside a job."""
NO_ANSWER = 124
"""Exit code of a command that did not finish in time."""

NO_ADDRESS = re.compile(
    r"Unable to resolve|res_nsearch error|Could not establish a configuration source|Can't find an address"
)
"""Printed by SLURM's commands if the controller's host name does not resolve."""

UNANSWERED = re.compile(
    "Socket timed out|Unable to contact slurm controller|Resource temporarily unavailable|Zero Bytes were transmitted"
    "|Connection (refused|reset|timed out)|Transport endpoint is not connected|Broken pipe|in standby mode"
    "|Failed to send entire message|Communication (connection|shutdown) failure|Unexpected missing socket"
    "|Unable to create job record, try again|try again (later|in a bit)|temporarily unable to accept job"
    "|Message (send|receive) failure|No route to host|Network is unreachable",
    re.IGNORECASE,
)
"""Printed by SLURM's commands if the controller did not answer; it may still have executed the request."""


class UnansweredError(SchedulerError):
    """SLURM did not answer. It may have executed the request: a job that was submitted may be queued."""


class UnknownJobError(SchedulerError):
    """SLURM's controller does not know a job of this number: it has ended, some time ago."""


@dataclass(frozen=True)
class SlurmReply:
    """Result of a SLURM command. Only ``output`` is parsed: SLURM and wrappers of sites print notices on stderr."""

    code: int
    """Exit code; `NO_ANSWER` if the command timed out."""
    output: str = ""
    """Standard output."""
    errors: str = ""
    """Standard error."""

    @property
    def message(self) -> str:
        """Standard error and standard output: the reason of a failure."""
        return "\n".join(filter(None, (self.errors, self.output)))

    @property
    def is_answered(self) -> bool:
        """True if SLURM executed or refused the command.

        A command that was killed by a signal is unanswered: where SLURM tracks processes by their parents
        (proctrack/linuxproc), a requeue kills the ``scontrol`` that requested it.
        """
        return self.code == 0 or (0 < self.code != NO_ANSWER and not UNANSWERED.search(self.message))


# -- on an event loop ------------------------------------------------------------------------------


async def run_slurm(
    *command: str, environment: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> SlurmReply:
    """Run a command without a shell. Never raises: a missing command has exit code 127.

    ``environment`` is added to this process's environment without the user's formats and filters. ``timeout_s``
    defaults to `ANSWER_S`.
    """
    timeout_s = ANSWER_S if timeout_s is None else timeout_s
    environ = query_environ(os.environ) | dict(environment or {})
    try:
        child = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environ
        )
    except OSError as error:
        return SlurmReply(127, errors=str(error))
    try:
        async with asyncio.timeout(timeout_s):
            streams = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.wait()
        return SlurmReply(NO_ANSWER, errors=f"{command[0]} did not answer within {timeout_s} s")
    # strip() without arguments would also strip `jobs.SEPARATOR` after an empty last field
    output, errors = (stream.decode(errors="replace").strip(" \n") for stream in streams)
    return SlurmReply(child.returncode or 0, output, errors)


async def retry_slurm(*command: str, environment: Mapping[str, str] | None = None) -> SlurmReply:
    """Same as `run_slurm`, repeated for `PATIENCE_S` while SLURM does not answer."""
    deadline = time.monotonic() + PATIENCE_S

    async def call() -> SlurmReply:
        left_s = max(1.0, deadline - time.monotonic())
        return await run_slurm(*command, environment=environment, timeout_s=min(ANSWER_S, left_s))

    backoff = Backoff(PATIENCE_S, FIRST_PAUSE_S, LAST_PAUSE_IN_JOB_S)
    return await retry_async(call, backoff, if_result=lambda reply: not reply.is_answered)


async def answered_output(*command: str) -> str:
    """Return the output of a command, empty if SLURM refuses it. Raises UnansweredError if SLURM does not answer."""
    reply = await run_slurm(*command)
    if not reply.is_answered:
        raise UnansweredError(f"{command[0]} did not answer: {reply.message}")
    return reply.output if reply.code == 0 else ""


async def seconds_left(job_id: str) -> float | None:
    """Return the seconds until the walltime ends the job: infinite without a limit, None if SLURM does not report it.

    Without an answer of squeue, SLURM_JOB_END_TIME is used (set since 23.02): the end that was planned at the start.
    """
    reply = await run_slurm(*queue_command(job_id, "%L"))
    if reply.code == 0:  # one row for each component
        rows = rows_of(job_id, reply.output, 1)
        times = [left for (text,) in rows if (left := parse_time_left(text)) is not None]
        return times[0] if times else None
    end = os.environ.get("SLURM_JOB_END_TIME")
    return float(end) - time.time() if end else None


def parse_time_left(text: str) -> float | None:
    """Return the seconds in squeue's %L: ``[[days-]hours:]minutes:seconds`` or UNLIMITED; None for other text."""
    if text.strip() == "UNLIMITED":
        return math.inf
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


# -- blocking --------------------------------------------------------------------------------------


def ask(command: list[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """Return the output of a query or command.

    Raises SchedulerError if the command is missing or refused, UnansweredError if SLURM does not answer,
    UnknownJobError if it does not know the job.
    """
    if shutil.which(command[0]) is None:
        raise SchedulerError(
            f"{command[0]} is not installed on this machine", hint="use a login node of the cluster"
        )
    reply = run_blocking(command, environ=query_environ(os.environ), timeout_s=timeout_s)
    if reply.code == NO_ANSWER:
        raise UnansweredError(f"{command[0]} did not answer within {timeout_s:.0f} s")
    if reply.code and NO_ADDRESS.search(reply.errors):
        raise no_address(command[0])
    if reply.code:
        is_unknown = "Invalid job id" in reply.errors
        error = UnknownJobError if is_unknown else SchedulerError
        error = UnansweredError if UNANSWERED.search(reply.errors) else error
        lines = reply.errors.strip().splitlines()
        raise error(f"{command[0]}: {lines[-1] if lines else f'exit code {reply.code}'}")
    return reply.output


def retry_ask(
    command: list[str], *, limit_s: float, before_pause: Callable[[Exception | None, float], None]
) -> str:
    """Same as `ask`, repeated for ``limit_s`` while SLURM does not answer."""
    backoff = Backoff(limit_s, FIRST_PAUSE_S, LAST_PAUSE_S)
    return retry(lambda: ask(command), backoff, if_raises=UnansweredError, before_pause=before_pause)


def run_blocking(
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    timeout_s: float,
    stdin: str = "",
    start_new_session: bool = False,
) -> SlurmReply:
    """Run a command in ``environ``; after ``timeout_s`` it is killed and its code is `NO_ANSWER`. Raises OSError."""
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            start_new_session=start_new_session,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:  # its streams are bytes although text was requested
        streams = [(stream or b"") for stream in (expired.stdout, expired.stderr)]
        output, errors = (
            stream if isinstance(stream, str) else stream.decode(errors="replace") for stream in streams
        )
        return SlurmReply(NO_ANSWER, output, errors)
    return SlurmReply(done.returncode, done.stdout, done.stderr)


# -- environment and text --------------------------------------------------------------------------


def query_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the user's default formats and filters for squeue, sacct and sinfo."""
    personal = ("SQUEUE_", "SACCT_", "SINFO_", "SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN")
    return {name: value for name, value in environ.items() if not name.startswith(personal)}


def no_address(message: str) -> SchedulerError:
    return SchedulerError(
        f"cannot resolve the address of SLURM's controller on this machine ({message})",
        hint="use a login node of the cluster; if this is one, ask the site",
    )


def printable(text: str, separator: str = "\n") -> str:
    """Return text of SLURM or a site's plug-in for a terminal: no empty lines, control characters escaped."""
    lines = (line.strip() for line in text.replace("\t", " ").splitlines())
    escaped = ("".join(char if char.isprintable() else _escaped(char) for char in line) for line in lines)
    return separator.join(line for line in escaped if line)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
