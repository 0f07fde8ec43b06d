"""Query the state of jobs with squeue and sacct.

Text output with explicit fields and an unusual separator is the same in all versions. JSON is not: 22.05 ignores the
filters of ``squeue --json`` and reports exit code 0 for failed jobs in ``sacct --json``; states and numbers changed
their format in 23.02, 23.11 and 24.11. `squeue` takes precedence while it lists a job, because sacct lags behind and
reports a running job as PENDING for seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.slurm.commands import ask

SEPARATOR = "\x1f"
SQUEUE_FIELDS = "%i %T %r %S %N"
SACCT_FIELDS = "JobID,State,ExitCode,Start,NodeList,Reason"

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

FORGOTTEN = "FORGOTTEN"
"""Not a state of SLURM: neither the controller nor accounting knows the job."""


@dataclass(frozen=True)
class JobFact:
    job_id: str
    state: str
    """State as reported by SLURM, without ``by UID``: RUNNING, NODE_FAIL, …"""
    reason: str = ""
    exit_code: int | None = None
    """Exit code of the batch process; None while it runs and if only squeue reported the job."""
    start: str = ""
    """ISO time of the start, or SLURM's estimate."""
    nodes: str = ""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def is_forgotten(self) -> bool:
        return self.state == FORGOTTEN

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
    """Return jobs by id. Lines without the requested fields are skipped: a site's wrapper may print banners."""
    facts = {}
    for fields in _rows(text, 5):
        job, state, reason, start, nodes = fields
        if (job := _leader(job)) is None:
            continue
        facts[job] = JobFact(job, state, _value(reason), None, _value(start), _value(nodes))
    return facts


def parse_sacct(text: str) -> dict[str, JobFact]:
    """Return jobs by id; for a requeued job, sacct reports the last execution."""
    facts = {}
    for job, state, exit_code, start, nodes, reason in _rows(text, 6):
        if (job := _leader(job)) is None:
            continue
        code = exit_code.partition(":")[0]
        facts[job] = JobFact(
            job,
            state.split(" ")[0].rstrip("+"),
            _value(reason),
            int(code) if code.isdigit() else None,
            _value(start),
            _value(nodes),
        )
    return facts


def _leader(job: str) -> str | None:
    """Convert ``123+0`` to ``123``; None for the other components of a heterogeneous job, which share its state."""
    job, _, component = job.partition("+")
    return job if component in ("", "0") else None


def _rows(text: str, width: int) -> list[list[str]]:
    rows = [line.strip(" ").split(SEPARATOR) for line in text.splitlines()]
    return [row for row in rows if len(row) == width]


def _value(word: str) -> str:
    """Return an empty text for SLURM's placeholders of missing values."""
    return "" if word in ("None", "N/A", "(null)", "Unknown", "None assigned") else word


def minutes(time: str | None) -> float | None:
    """Parse ``minutes``, ``hours:minutes:seconds``, ``days-hours:minutes:seconds`` …; None without a limit."""
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


def is_job_over(job_id: str) -> bool:
    """True if SLURM reports that this job has ended for good. False if SLURM does not answer."""
    try:
        fact = parse_squeue(ask(squeue_command([job_id]))).get(job_id)
    except SchedulerError:
        return False
    return fact is None or fact.has_ended
