"""What SLURM says about jobs: states in its words, and the two text questions everything here asks it.

Text with explicit fields and a separator nobody types reads the same on every version. JSON does not: 22.05 ignores the
filters of ``squeue --json`` and reports exit code 0 for failed jobs in ``sacct --json``; states and numbers changed
shape in 23.02, 23.11 and 24.11. `squeue` decides while it knows a job (sacct lags and calls a running job PENDING for
seconds); after that, sacct.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from primerl_hpc.common.errors import SchedulerError

SEPARATOR = "\x1f"
SQUEUE_FIELDS = "%i %T %r %S %N"
SACCT_FIELDS = "JobID,State,ExitCode,Start,NodeList,Reason"
COMMAND_TIMEOUT_S = 30.0

NO_ADDRESS = re.compile(
    r"Unable to resolve|res_nsearch error|Could not establish a configuration source|Can't find an address"
)
"""What SLURM's commands print where the controller's host name does not resolve."""

UNANSWERED = re.compile(
    "Socket timed out|Unable to contact slurm controller|Resource temporarily unavailable|Zero Bytes were transmitted"
    "|Connection (refused|reset|timed out)|Transport endpoint is not connected|Broken pipe|in standby mode"
    "|Failed to send entire message|Communication (connection|shutdown) failure|Unexpected missing socket"
    "|Unable to create job record, try again|try again (later|in a bit)|temporarily unable to accept job"
    "|Message (send|receive) failure|No route to host|Network is unreachable",
    re.IGNORECASE,
)
"""What SLURM's commands print when the controller did not answer: it may have done what was asked."""

ENDED = frozenset(
    (
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    )
)
WAITING = frozenset(
    ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "CONFIGURING")
)


class UnansweredError(SchedulerError):
    """SLURM did not say whether it did what was asked: what was to be queued may be in the queue."""


@dataclass(frozen=True)
class JobFact:
    job_id: str
    state: str
    """SLURM's own word, without ``by UID``: RUNNING, NODE_FAIL, …"""
    reason: str = ""
    exit_code: int | None = None
    """Of the batch process; None while it runs, and where only squeue told."""
    start: str = ""
    """ISO time: when it started, or SLURM's estimate."""
    nodes: str = ""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def is_waiting(self) -> bool:
        return self.state in WAITING


def squeue_command(jobs: Iterable[str]) -> list[str]:
    fields = SQUEUE_FIELDS.replace(" ", SEPARATOR)
    return ["squeue", "--noheader", "--states=all", f"--jobs={','.join(jobs)}", f"--format={fields}"]


def sacct_command(jobs: Iterable[str]) -> list[str]:
    listing = ["sacct", "--noheader", "--allocations", "--parsable2", f"--delimiter={SEPARATOR}"]
    return [*listing, f"--jobs={','.join(jobs)}", f"--format={SACCT_FIELDS}"]


def parse_squeue(text: str) -> dict[str, JobFact]:
    """Jobs by id. A line that does not have the asked fields is skipped: a site's wrapper may print banners."""
    facts = {}
    for fields in _rows(text, 5):
        job, state, reason, start, nodes = fields
        if (job := _leader(job)) is None:
            continue
        facts[job] = JobFact(job, state, _said(reason), None, _said(start), _said(nodes))
    return facts


def parse_sacct(text: str) -> dict[str, JobFact]:
    """Jobs by id; of a requeued job sacct tells the last life."""
    facts = {}
    for job, state, exit_code, start, nodes, reason in _rows(text, 6):
        if (job := _leader(job)) is None:
            continue
        code = exit_code.partition(":")[0]
        facts[job] = JobFact(
            job,
            state.split(" ")[0].rstrip("+"),
            _said(reason),
            int(code) if code.isdigit() else None,
            _said(start),
            _said(nodes),
        )
    return facts


def _leader(job: str) -> str | None:
    """``123+0`` → ``123``; None for the other components of a heterogeneous job, which share its fate."""
    job, _, component = job.partition("+")
    return job if component in ("", "0") else None


def _rows(text: str, width: int) -> list[list[str]]:
    rows = [line.strip(" ").split(SEPARATOR) for line in text.splitlines()]
    return [row for row in rows if len(row) == width]


def _said(word: str) -> str:
    return "" if word in ("None", "N/A", "(null)", "Unknown", "None assigned") else word


def minutes(time: str | None) -> float | None:
    """SLURM's ``minutes``, ``hours:minutes:seconds``, ``days-hours:minutes:seconds`` …; None for no limit."""
    if time is None or not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time):
        return None
    days, _, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:  # days-hours[:minutes[:seconds]]
        hours, mins, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, mins, seconds = parts
    else:  # minutes[:seconds]
        hours, (mins, seconds) = 0, (*parts, 0)[:2]
    return (int(days or 0) * 24 + hours) * 60 + mins + seconds / 60


def query_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Without the variables by which people change formats and filters of their own squeue, sacct and sinfo."""
    personal = ("SQUEUE_", "SACCT_", "SINFO_", "SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN")
    return {name: value for name, value in environ.items() if not name.startswith(personal)}


def no_address(words: str) -> SchedulerError:
    return SchedulerError(
        f"the address of SLURM's controller cannot be found on this machine ({words})",
        mend="use a login node of the cluster; if this is one, ask the site",
    )


def ask(command: list[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """Output of a SLURM query.

    Raises SchedulerError when SLURM is not here or refuses, UnansweredError when it does not answer. A job it does not
    know is no error.
    """
    if shutil.which(command[0]) is None:
        raise SchedulerError(
            f"{command[0]} is not on this machine", mend="look from a login node of the cluster"
        )
    try:
        done = subprocess.run(
            command,
            env=query_environ(os.environ),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnansweredError(f"{command[0]} did not answer within {timeout_s:.0f} s") from None
    if done.returncode and NO_ADDRESS.search(done.stderr):
        raise no_address(command[0])
    is_unanswered = UNANSWERED.search(done.stderr) is not None
    if done.returncode and (is_unanswered or "Invalid job id" not in done.stderr):
        words = done.stderr.strip().splitlines()
        error = UnansweredError if is_unanswered else SchedulerError
        raise error(f"{command[0]}: {words[-1] if words else f'exit code {done.returncode}'}")
    return done.stdout


def is_job_over(job_id: str) -> bool:
    """Whether SLURM knows that this job runs no more and will not again. False when it does not answer."""
    try:
        fact = parse_squeue(ask(squeue_command([job_id]))).get(job_id)
    except SchedulerError:
        return False
    return fact is None or fact.has_ended
