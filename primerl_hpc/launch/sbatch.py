"""Hands one script to sbatch: exactly once, whatever the network does meanwhile, and in an environment that adds nothing.

    job_id = submit_once(Path(".submission_file_5f3a.sh"), ["--hold"], say=print)

sbatch may report a fault of the transport after SLURM has taken the job. So before another try, SLURM is asked for a job
of this very file: its name is unique, and SLURM keeps the path it was submitted from (``squeue %o``, ``sacct
SubmitLine``). Until SLURM answers that question, nothing is submitted again.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.common.slurm import SEPARATOR, ask
from primerl_hpc.launch.refusals import explain_refusal
from primerl_hpc.render.lint import directives_of

SBATCH_TIMEOUT_S = 120.0
"""sbatch itself tries for a while; after this it counts as unanswered."""
PATIENCE_S = 300.0
"""How long a SLURM that does not answer is tried again."""
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0

_UNANSWERED = re.compile(
    "Socket timed out|Unable to contact slurm controller|Resource temporarily unavailable|Zero Bytes were transmitted"
    "|Connection (refused|reset|timed out)|Transport endpoint is not connected|Broken pipe|in standby mode"
    "|Failed to send entire message|Communication (connection|shutdown) failure|Unexpected missing socket"
    "|Unable to create job record, try again|try again (later|in a bit)|temporarily unable to accept job"
    "|Message (send|receive) failure|No route to host|Network is unreachable",
    re.IGNORECASE,
)
_JOB = re.compile(r"Submitted batch job (\d+)")
_SITE_DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_TIMELIMIT": "time",
    "SBATCH_WCKEY": "wckey",
}
"""Variables people set in their shell as a default of the site, and the option that takes their place."""
_CLIENT_SETTINGS = frozenset(("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"))
_JOB_PREFIXES = ("SBATCH_", "SLURM_", "SLURMD_", "SRUN_", "SALLOC_", "PMI_", "PMIX_")


class UnansweredError(SchedulerError):
    """SLURM did not say whether it took the job: it may be in the queue."""


def submission_environ(environ: Mapping[str, str], options: Iterable[str]) -> dict[str, str]:
    """``environ`` without what would override the script or leak from a job that this one is submitted from.

    sbatch prefers SBATCH_* to the script's own directives, and the steps of a job read SLURM_* of the job around it.
    A site's default (SBATCH_ACCOUNT, …) stays where the script does not say it: ``options`` are those it does.
    """
    said = set(options)
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_JOB_PREFIXES)
        or name in _CLIENT_SETTINGS
        or (name in _SITE_DEFAULTS and _SITE_DEFAULTS[name] not in said)
    }


def submit_once(script: Path, options: Sequence[str] = (), *, say: Callable[[str], None]) -> str:
    """The job's id. Raises SchedulerError with the reason when SLURM refuses, UnansweredError when it never answers."""
    directives = directives_of(script.read_text())
    environ = submission_environ(os.environ, directives)
    deadline, pause, trouble = time.monotonic() + PATIENCE_S, FIRST_PAUSE_S, ""
    while True:
        done = _run_sbatch(["sbatch", *options, str(script)], environ)
        if (found := _JOB.search(done.stdout)) is not None:
            return _only(script, found[1], say) if trouble else found[1]
        trouble = _last_line(done.stderr)
        if not _UNANSWERED.search(done.stderr):
            raise explain_refusal(done.stderr or done.stdout, directives)
        jobs: list[str] | None = None  # not known yet
        while jobs is None:
            if time.monotonic() + pause > deadline:
                raise UnansweredError(
                    f"SLURM did not say within {PATIENCE_S:.0f} s whether it took the job ({trouble})",
                    mend="wait until squeue answers, then resume the run: a job that is there is found, not queued twice",
                )
            say(f"{trouble}; looking whether the job is in the queue, again in {pause:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_S)
            try:
                jobs = find_jobs(script)
            except SchedulerError as error:
                trouble = str(error)
        if jobs:
            say(f"the job is in the queue all the same: {jobs[0]}")
            return _only(script, jobs[0], say)


def find_jobs(script: Path) -> list[str]:
    """Ids of my jobs that were submitted from this file, oldest first. Raises SchedulerError when SLURM does not answer."""
    fields = f"%F{SEPARATOR}%o"
    queue = ["squeue", "--noheader", "--states=all", f"--user={os.getuid()}", f"--format={fields}"]
    rows = [line.partition(SEPARATOR) for line in ask(queue).splitlines()]
    found = {job for job, _, command in rows if script.name in command and job.isdigit()}
    if not found:
        found = _in_accounting(script)
    return sorted(found, key=int)


def _in_accounting(script: Path) -> set[str]:
    """A job so short that squeue has forgotten it. Without accounting, or before 21.08, there is none to be found."""
    asked = ["sacct", "--noheader", "--allocations", "--parsable2", f"--delimiter={SEPARATOR}"]
    try:
        said = ask([*asked, "--starttime=now-1hours", "--format=JobIDRaw,SubmitLine"])
    except SchedulerError:
        return set()
    rows = [line.partition(SEPARATOR) for line in said.splitlines()]
    return {job for job, _, command in rows if script.name in command and job.isdigit()}


def _only(script: Path, job: str, say: Callable[[str], None]) -> str:
    """``job``, after the end of any other that an earlier try left behind.

    One that comes later still, or that SLURM does not tell of now, finds the run's supervisor lock taken and ends.
    """
    try:
        for other in find_jobs(script):
            if other != job:
                say(f"an earlier try had reached SLURM after all: job {other} is cancelled")
                ask(["scancel", other])
    except SchedulerError as error:
        say(f"cannot look for a job of an earlier try: {error}")
    return job


def _run_sbatch(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """In a session of its own: ^C must not leave it between asking and telling."""
    try:
        return subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SBATCH_TIMEOUT_S,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        said = f"sbatch: Socket timed out: no answer within {SBATCH_TIMEOUT_S:.0f} s"
        return subprocess.CompletedProcess(command, 1, "", said)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("sbatch: ").removeprefix("error: ") if lines else "no answer"
