"""Query the state of jobs with squeue and sacct.

Text output with explicit fields and an unusual separator is the same in all versions. JSON is not: 22.05 ignores the
filters of ``squeue --json`` and reports exit code 0 for failed jobs in ``sacct --json``; states and numbers changed
their format in 23.02, 23.11 and 24.11. `squeue` takes precedence while it lists a job, because sacct lags behind and
reports a running job as PENDING for seconds.

    facts = find_facts(["7", "8"])         # what squeue or else accounting reports, under the numbers that were asked
    is_job_over("7")

"Not listed" does not mean "over": see `find_facts`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.slurm.command_lines import SEPARATOR
from primerl_hpc.slurm.commands import UnknownJobError, ask

SQUEUE_FIELDS = "%A %i %T %r %S %N %V %j"
SACCT_FIELDS = "JobIDRaw,JobID,State,ExitCode,Start,NodeList,Reason,Submit,JobName"
MOST_ALONE = 8
"""Maximum number of jobs that one call asks squeue about separately."""

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
"""Not a state of SLURM: the controller does not know the job, and accounting does not report its end."""


@dataclass(frozen=True)
class JobFact:
    job_id: str
    """The job's own number, which is not the number of its array."""
    state: str
    """State as reported by SLURM, without ``by UID``: RUNNING, NODE_FAIL, …"""
    reason: str = ""
    exit_code: int | None = None
    """Exit code of the batch process; None while it runs and if only squeue reported the job."""
    start: str = ""
    """ISO time of the start, or SLURM's estimate."""
    nodes: str = ""
    submitted: str = ""
    """ISO time of the submission, or of the last requeue."""
    name: str = ""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def is_forgotten(self) -> bool:
        return self.state == FORGOTTEN

    @property
    def is_over(self) -> bool:
        return self.has_ended or self.is_forgotten

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
    for number, listed, state, reason, start, nodes, submitted, name in _rows(text, 8):
        if is_leader(listed):
            times = _value(start), _value(nodes), _value(submitted)
            facts[number] = JobFact(number, state, _value(reason), None, *times, name)
    return facts


def parse_sacct(text: str) -> dict[str, JobFact]:
    """Return jobs by id; for a requeued job, sacct reports the last execution."""
    facts = {}
    for number, listed, state, exit_code, start, nodes, reason, submitted, name in _rows(text, 9):
        if not is_leader(listed):
            continue
        code = exit_code.partition(":")[0]
        facts[number] = JobFact(
            number,
            state.split(" ")[0].rstrip("+"),
            _value(reason),
            int(code) if code.isdigit() else None,
            _value(start),
            _value(nodes),
            _value(submitted),
            name,
        )
    return facts


def is_leader(listed: str) -> bool:
    """False for components of a heterogeneous job except the first (``123+0``), which share its state."""
    return listed.partition("+")[2] in ("", "0")


def _rows(text: str, width: int) -> list[list[str]]:
    rows = [line.strip(" ").split(SEPARATOR) for line in text.splitlines()]
    return [row for row in rows if len(row) == width]


def _value(word: str) -> str:
    """Return an empty text for SLURM's placeholders of missing values."""
    return "" if word in ("None", "N/A", "(null)", "Unknown", "None assigned") else word


def epoch_s(time: str) -> float | None:
    """Convert an ISO time of this machine's time zone, as SLURM prints it; None for ``Unknown``."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None


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


def find_facts(jobs: Sequence[str], ask: Callable[[list[str]], str] = ask) -> dict[str, JobFact]:
    """Return what SLURM reports about these jobs, by the numbers that were asked. Raises SchedulerError.

    A job that squeue does not list may have ended long ago, or a site's wrapper may hide it. It has ended if accounting
    reports that, and it is `FORGOTTEN` if squeue, asked about it alone, answers that its number is invalid. Otherwise
    nothing is known about it, and it is absent.
    """
    facts, invalid = _listed(jobs, ask)
    missing = [job for job in jobs if job not in facts]
    past = _accounted(missing, ask) if missing else {}
    for job in [job for job in missing if job not in past or not past[job].has_ended][:MOST_ALONE]:
        if job not in invalid:
            alone, unknown = _listed([job], ask)
            facts, invalid = facts | alone, invalid | unknown
    for job in [job for job in missing if job not in facts]:
        if job in past and (past[job].has_ended or job not in invalid):
            facts[job] = past[job]
        elif job in invalid:
            facts[job] = JobFact(job, FORGOTTEN)
    return facts


def _listed(jobs: Sequence[str], ask: Callable[[list[str]], str]) -> tuple[dict[str, JobFact], set[str]]:
    """Return the facts of squeue, and the jobs whose numbers it explicitly reports as invalid."""
    try:
        found = parse_squeue(ask(squeue_command(jobs)))
    except UnknownJobError:
        return {}, set(jobs) if len(jobs) == 1 else set()
    return {job: found[job] for job in jobs if job in found}, set()


def _accounted(jobs: Sequence[str], ask: Callable[[list[str]], str]) -> dict[str, JobFact]:
    """Return the facts of sacct; none on a cluster without accounting."""
    try:
        found = parse_sacct(ask(sacct_command(jobs)))
    except SchedulerError:
        return {}
    return {job: found[job] for job in jobs if job in found}


def is_job_over(job_id: str) -> bool:
    """True if SLURM reports that this job has ended for good. False if it does not answer, or reports nothing."""
    try:
        fact = find_facts([job_id]).get(job_id)
    except SchedulerError:
        return False
    return fact is not None and fact.is_over
