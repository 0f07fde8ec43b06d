"""Submit a script with sbatch exactly once, despite network faults, in an environment that adds nothing to the script.

    job_id, copy = submit_once(Path("launch/job.sbatch"), Path("launch/submitit"), ["--hold"],
                               patience_s=300, timeout_s=120, report=print)

sbatch may report a transport error after SLURM has accepted the job. Before sbatch is run again, SLURM is therefore
queried for a job of this file: the file's name is unique, and SLURM records the path that was submitted (``squeue %o``,
``sacct SubmitLine``). Nothing is submitted again until SLURM answers that query.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from primerl_hpc.common.errors import ConfigError, SchedulerError
from primerl_hpc.common.passed import PassedVariables
from primerl_hpc.common.waiting import Backoff, retry
from primerl_hpc.slurm import commands
from primerl_hpc.slurm.command_lines import SEPARATOR
from primerl_hpc.slurm.commands import (
    COMMAND_TIMEOUT_S,
    NO_ANSWER,
    UNANSWERED,
    SlurmReply,
    UnansweredError,
    UnknownJobError,
    ask,
    printable,
    run_blocking,
)
from primerl_hpc.slurm.jobs import is_leader

_JOB = re.compile(r"Submitted batch job (?P<id>\d+)(?: on cluster (?P<cluster>\S+))?")
_SITE_DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_TIMELIMIT": "time",
    "SBATCH_WCKEY": "wckey",
}
"""Variables that users export as defaults for a site → the option that each one replaces."""
_CLIENT_SETTINGS = frozenset(("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"))
JOB_PREFIXES = ("SBATCH_", "SLURM_", "SLURMD_", "SRUN_", "SALLOC_", "PMI_", "PMIX_")
"""Prefixes of variables that SLURM sets in jobs and steps, or reads instead of options."""
DEFAULT = PassedVariables()


class RefusedError(SchedulerError):
    """SLURM refused the job; ``output`` is everything that sbatch printed."""

    def __init__(self, output: str) -> None:
        self.output = output
        super().__init__(_last_line(output))


def directives_of(script: str) -> dict[str, str | None]:
    """Return the options of the ``#SBATCH`` lines that sbatch reads; None is the value of an option without one."""
    found: dict[str, str | None] = {}
    for component in components_of(script):
        found |= component
    return found


def components_of(script: str) -> list[dict[str, str | None]]:
    """Same as `directives_of`, for each component of a heterogeneous job; one for an ordinary job."""
    found: list[dict[str, str | None]] = [{}]
    for line in script.split("\n"):
        if line.startswith("#SBATCH"):
            for word in shlex.split(line.removeprefix("#SBATCH"), comments=True):
                name, equals, value = word.removeprefix("--").partition("=")
                if name == "hetjob":
                    found.append({})
                else:
                    found[-1][name] = value if equals else None
        elif line.strip() and not line.strip().startswith("#"):
            break
    return found


def submission_environ(
    environ: Mapping[str, str], options: Iterable[str], passed: PassedVariables = DEFAULT
) -> dict[str, str]:
    """Return the variables that pass, without those that would override the script or leak from the submitting job.

    SBATCH_* take precedence over the script's directives, and steps of a job read the SLURM_* of the job that submitted
    theirs. The default of a site (SBATCH_ACCOUNT, …) is kept if the script does not set that option; ``options`` are
    those that the script sets.
    """
    given = set(options)
    return {
        name: value
        for name, value in environ.items()
        if (not name.startswith(JOB_PREFIXES) and passed.passes(name, value))
        or name in _CLIENT_SETTINGS
        or (name in _SITE_DEFAULTS and _SITE_DEFAULTS[name] not in given)
    }


def refuse_other_clusters(environ: Mapping[str, str], options: Iterable[str]) -> None:
    """Raise ConfigError if sbatch would choose among several clusters.

    Ids of jobs are unique within a cluster only, and every later command would ask the default cluster: the job would
    seem to have ended, and a resumed run would queue it twice.
    """
    for option in options:
        if option in ("clusters", "cluster") or option.startswith("-M"):
            raise _other_cluster(f"the script sets {'--clusters' if option[0] != '-' else '-M'}")
    for name in ("SBATCH_CLUSTERS", "SLURM_CLUSTERS"):
        if environ.get(name):
            raise _other_cluster(f"{name} is set to {environ[name]}")


def _other_cluster(reason: str) -> ConfigError:
    return ConfigError(
        f"{reason}, but jobs on another cluster than SLURM's default are not supported",
        hint="use a login node of that cluster, or set SLURM_CONF to its slurm.conf, and remove the option or variable",
    )


def submit_once(
    script: Path,
    folder: Path,
    options: Sequence[str] = (),
    *,
    patience_s: float,
    timeout_s: float,
    report: Callable[[str], None],
    passed: PassedVariables = DEFAULT,
) -> tuple[str, Path]:
    """Return the job's id and the copy of ``script`` in ``folder`` that was submitted.

    ``timeout_s`` limits one command, which then counts as unanswered; ``patience_s`` limits all of them together.
    ``report`` receives a message before each retry.
    Raises RefusedError, ConfigError for a job on another cluster.
    Raises UnansweredError and keeps the copy, so that `find_jobs` can find the job later.
    """
    refuse_other_clusters(os.environ, directives_of(script.read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / f".submission_file_{uuid.uuid4().hex}.sh"
    copy.write_text(script.read_text())
    try:
        return _Submission(copy, options, patience_s, timeout_s, report, passed).run(), copy
    except (RefusedError, ConfigError, OSError):
        copy.unlink(missing_ok=True)
        raise


class _Submission:
    def __init__(
        self,
        script: Path,
        options: Sequence[str],
        patience_s: float,
        timeout_s: float,
        report: Callable[[str], None],
        passed: PassedVariables,
    ) -> None:
        self.script, self.report = script, report
        self.command = ["sbatch", *options, str(script)]
        self.environ = submission_environ(os.environ, directives_of(script.read_text()), passed)
        self.patience_s, self.timeout_s = patience_s, timeout_s
        self.deadline = time.monotonic() + patience_s
        self.is_uncertain = False
        """True after an sbatch whose outcome is unknown."""

    def run(self) -> str:
        """Return the job's id."""
        backoff = Backoff(self.patience_s, commands.FIRST_PAUSE_S, commands.LAST_PAUSE_S)
        try:
            return retry(
                self._try,
                backoff,
                if_raises=UnansweredError,
                before_pause=lambda error, pause_s: self.report(
                    f"{error}; in {pause_s:.0f} s, checking whether the job is in the queue "
                    "and submitting it again if not"
                ),
            )
        except UnansweredError as error:
            raise UnansweredError(
                f"SLURM did not report within {self.patience_s:.0f} s whether it accepted the job ({error})",
                hint="wait until squeue answers, then resume the run: it finds a queued job instead of "
                "queueing another one",
            ) from None

    def _try(self) -> str:
        """Return the job's id. Raises RefusedError, and UnansweredError if the outcome is unknown."""
        if self.is_uncertain and (jobs := self._find_jobs()):
            self.report(f"the job is in the queue nevertheless: {jobs[0]}")
            return self._cancel_others(jobs[0])
        limit_s = self._limit_s(self.timeout_s)
        reply = run_blocking(
            self.command,
            environ=self.environ,
            timeout_s=limit_s,
            start_new_session=True,  # Ctrl-C must not interrupt sbatch between the request and the reply
        )
        if (found := _JOB.search(reply.output)) is not None:
            if found["cluster"] is not None:
                cancel = ["scancel", f"--clusters={found['cluster']}", found["id"]]
                run_blocking(cancel, environ=self.environ, timeout_s=limit_s)
                raise _other_cluster(
                    f"sbatch submitted the job to cluster {found['cluster']}; it is cancelled"
                )
            return self._cancel_others(found["id"]) if self.is_uncertain else found["id"]
        if reply.code != NO_ANSWER and not UNANSWERED.search(reply.errors):
            raise RefusedError(reply.errors or reply.output)
        self.is_uncertain = True
        if reply.code == NO_ANSWER:
            raise UnansweredError(
                f"sbatch did not finish within {limit_s:.0f} s; it printed: {_in_line(reply)}"
            )
        raise UnansweredError(_last_line(reply.errors))

    def _limit_s(self, wanted_s: float) -> float:
        """Return the time limit of one command: ``wanted_s``, or less if the deadline is near."""
        return min(wanted_s, max(1.0, self.deadline - time.monotonic()))

    def _find_jobs(self) -> list[str]:
        """Return the jobs of this script. Raises UnansweredError for any failure of the query: it must be repeated."""
        try:
            return find_jobs(self.script, self._limit_s(COMMAND_TIMEOUT_S))
        except SchedulerError as error:
            raise UnansweredError(str(error)) from None

    def _cancel_others(self, job: str) -> str:
        """Cancel all other jobs of this script, which earlier calls of sbatch left behind, and return ``job``.

        A job that SLURM reports later exits when it finds the run's supervisor lock taken.
        """
        limit_s = self._limit_s(COMMAND_TIMEOUT_S)
        try:
            for other in find_jobs(self.script, limit_s):
                if other != job:
                    self.report(f"an earlier sbatch had succeeded: cancelling its job {other}")
                    with contextlib.suppress(UnknownJobError):
                        ask(["scancel", other], limit_s)
        except SchedulerError as error:
            self.report(f"cannot check for a job of an earlier sbatch: {error}")
        return job


def find_jobs(script: Path, timeout_s: float = COMMAND_TIMEOUT_S) -> list[str]:
    """Return the ids of the user's jobs that were submitted from this file, oldest first. Raises SchedulerError."""
    fields = SEPARATOR.join(("%A", "%i", "%o"))
    queue = ["squeue", "--noheader", "--states=all", f"--user={os.getuid()}", f"--format={fields}"]
    found = _submitted_as(script, ask(queue, timeout_s))
    if not found:
        found = _in_accounting(script, timeout_s)
    return sorted(found, key=int)


def _in_accounting(script: Path, timeout_s: float) -> set[str]:
    """Return jobs so short that squeue no longer lists them; none without accounting or before SLURM 21.08."""
    query = ["sacct", "--noheader", "--allocations", "--parsable2", f"--delimiter={SEPARATOR}"]
    try:
        output = ask([*query, "--starttime=now-1hours", "--format=JobIDRaw,JobID,SubmitLine"], timeout_s)
    except SchedulerError:
        return set()
    return _submitted_as(script, output)


def _submitted_as(script: Path, text: str) -> set[str]:
    """Return the jobs of this script: rows of own number, number for users and command. Components are not jobs."""
    rows = [line.split(SEPARATOR, maxsplit=2) for line in text.splitlines()]
    jobs = [row for row in rows if len(row) == 3 and script.name in row[2] and is_leader(row[1])]
    return {number for number, *_ in jobs if number.isdigit()}


def _in_line(reply: SlurmReply) -> str:
    """Return the output of sbatch in one line, without the duplicates that it prints while it retries."""
    lines = dict.fromkeys(printable(f"{reply.errors}\n{reply.output}").splitlines())
    return "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines) or "nothing"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("sbatch: ").removeprefix("error: ") if lines else "no answer"
