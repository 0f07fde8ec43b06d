"""Output of squeue and sacct, as the package requests it."""

from __future__ import annotations

from collections.abc import Sequence

from primerl_hpc.slurm.command_lines import SEPARATOR
from primerl_hpc.slurm.commands import UnknownJobError

SUBMITTED = "2026-01-01T00:00:00"


def row(*fields: str) -> str:
    return SEPARATOR.join(fields) + "\n"


def queue_row(
    job: str,
    state: str,
    reason: str = "None",
    start: str = "",
    nodes: str = "n1",
    *,
    listed: str | None = None,
    submitted: str = SUBMITTED,
    name: str = "toy",
) -> str:
    """A job for `slurm.jobs.parse_squeue`. ``listed``: the number for users, such as 1_3 for the task of an array."""
    return row(job, listed or job, state, reason, start, nodes, submitted, name)


def account_row(
    job: str,
    state: str,
    code: str = "0:0",
    start: str = "",
    nodes: str = "n1",
    reason: str = "None",
    *,
    listed: str | None = None,
    submitted: str = SUBMITTED,
    name: str = "toy",
) -> str:
    """A job for `slurm.jobs.parse_sacct`."""
    return row(job, listed or job, state, code, start, nodes, reason, submitted, name)


def outcome_row(
    job: str, name: str, state: str, code: str, nodes: str, reason: str, *, listed: str | None = None
) -> str:
    """A job or step for `observe.diagnose.diagnose.parse_outcome`."""
    return row(job, listed or job, name, state, code, nodes, reason, SUBMITTED)


def usage_row(
    job: str,
    state: str,
    seconds: str,
    nodes: str,
    resources: str,
    start: str = SUBMITTED,
    *,
    listed: str = "",
) -> str:
    """A record for `observe.status.usage.parse_usage`."""
    return row(job, listed or job, state, seconds, nodes, resources, start)


def asked_jobs(command: Sequence[str]) -> list[str]:
    return next(word for word in command if word.startswith("--jobs=")).removeprefix("--jobs=").split(",")


def squeue_answer(command: Sequence[str], text: str) -> str:
    """Return ``text``, or raise what squeue reports if it is asked about one job that it does not know."""
    jobs = asked_jobs(command)
    if len(jobs) == 1 and not any(line.split(SEPARATOR)[0] == jobs[0] for line in text.splitlines()):
        raise UnknownJobError("slurm_load_jobs error: Invalid job id specified")
    return text


def printed(*rows: str) -> str:
    """A line of a shell script that prints these rows."""
    text = "".join(rows).replace(SEPARATOR, r"\037").replace("\n", r"\n").replace("%", "%%")
    return f"printf '{text}'"


UNKNOWN_JOB = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
"""A line of a shell script: squeue asked about a job that has left its memory."""


class Slurm:
    """Answers squeue and sacct with the same rows each time, and records which of them was asked."""

    def __init__(self, squeue: str = "", sacct: str = "") -> None:
        self.answers, self.asked = {"squeue": squeue, "sacct": sacct}, list[str]()

    def __call__(self, command: list[str]) -> str:
        self.asked.append(command[0])
        text = self.answers[command[0]]
        return squeue_answer(command, text) if command[0] == "squeue" else text
