"""Hands one script to sbatch: exactly once, whatever the network does meanwhile, and in an environment that adds nothing.

    job_id, kept_at = submit_copy(Path("launch/job.sbatch"), Path("launch/submitit"), ["--hold"],
                                  patience_s=300, timeout_s=120, say=print)

sbatch may report a fault of the transport after SLURM has taken the job. So before another try, SLURM is asked for a job
of this very file: its name is unique, and SLURM keeps the path it was submitted from (``squeue %o``, ``sacct
SubmitLine``). Until SLURM answers that question, nothing is submitted again.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.common.slurm import COMMAND_TIMEOUT_S, SEPARATOR, UNANSWERED, UnansweredError, ask

FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0

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


class RefusedError(SchedulerError):
    """SLURM does not take the job; ``said`` is all that sbatch printed."""

    def __init__(self, said: str) -> None:
        self.said = said
        super().__init__(_last_line(said))


def directives_of(script: str) -> dict[str, str | None]:
    """The options of a script's ``#SBATCH`` lines, as far as sbatch reads them; None for one without value."""
    found: dict[str, str | None] = {}
    for line in script.split("\n"):
        if line.startswith("#SBATCH"):
            for word in shlex.split(line.removeprefix("#SBATCH"), comments=True):
                name, equals, value = word.removeprefix("--").partition("=")
                found[name] = value if equals else None
        elif line.strip() and not line.strip().startswith("#"):
            break
    return found


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


def submit_copy(
    script: Path,
    folder: Path,
    options: Sequence[str] = (),
    *,
    patience_s: float,
    timeout_s: float,
    say: Callable[[str], None],
) -> tuple[str, Path]:
    """The job's id, and the copy of ``script`` in ``folder`` that it was submitted from.

    ``timeout_s`` is for one command, ``patience_s`` for all of them; after a command's time it counts as unanswered.
    Raises RefusedError, or UnansweredError with the copy kept: by its name the job can be found later (`find_jobs`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / f".submission_file_{uuid.uuid4().hex}.sh"
    copy.write_text(script.read_text())
    try:
        return _Submission(copy, options, patience_s, timeout_s, say).run(), copy
    except (RefusedError, OSError):
        copy.unlink(missing_ok=True)
        raise


class _Submission:
    def __init__(
        self,
        script: Path,
        options: Sequence[str],
        patience_s: float,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.script, self.say = script, say
        self.command = ["sbatch", *options, str(script)]
        self.environ = submission_environ(os.environ, directives_of(script.read_text()))
        self.patience_s, self.timeout_s = patience_s, timeout_s
        self.deadline, self.pause_s = time.monotonic() + patience_s, FIRST_PAUSE_S

    def run(self) -> str:
        trouble = ""
        while True:
            done = _run_sbatch(self.command, self.environ, self._time_s(self.timeout_s))
            if (found := _JOB.search(done.stdout)) is not None:
                return self._only(found[1]) if trouble else found[1]
            trouble = _last_line(done.stderr)
            if not UNANSWERED.search(done.stderr):
                raise RefusedError(done.stderr or done.stdout)
            if jobs := self._look(trouble):
                self.say(f"the job is in the queue all the same: {jobs[0]}")
                return self._only(jobs[0])

    def _time_s(self, wanted_s: float) -> float:
        """For one command, of what is left."""
        return min(wanted_s, max(1.0, self.deadline - time.monotonic()))

    def _look(self, trouble: str) -> list[str]:
        """Jobs of this script, once SLURM answers. Raises UnansweredError at the deadline."""
        while True:
            if time.monotonic() + self.pause_s > self.deadline:
                raise UnansweredError(
                    f"SLURM did not say within {self.patience_s:.0f} s whether it took the job ({trouble})",
                    mend="wait until squeue answers, then resume the run: a job that is there is found, not queued twice",
                )
            self.say(f"{trouble}; looking whether the job is in the queue, again in {self.pause_s:.0f} s")
            time.sleep(self.pause_s)
            self.pause_s = min(2 * self.pause_s, LAST_PAUSE_S)
            try:
                return find_jobs(self.script, self._time_s(COMMAND_TIMEOUT_S))
            except SchedulerError as error:
                trouble = str(error)

    def _only(self, job: str) -> str:
        """``job``, after the end of any other that an earlier try left behind.

        One that comes later still, or that SLURM does not tell of now, finds the run's supervisor lock taken and ends.
        """
        time_s = self._time_s(COMMAND_TIMEOUT_S)
        try:
            for other in find_jobs(self.script, time_s):
                if other != job:
                    self.say(f"an earlier try had reached SLURM after all: job {other} is cancelled")
                    ask(["scancel", other], time_s)
        except SchedulerError as error:
            self.say(f"cannot look for a job of an earlier try: {error}")
        return job


def find_jobs(script: Path, timeout_s: float = COMMAND_TIMEOUT_S) -> list[str]:
    """Ids of my jobs that were submitted from this file, oldest first. Raises SchedulerError when SLURM does not answer."""
    fields = f"%F{SEPARATOR}%o"
    queue = ["squeue", "--noheader", "--states=all", f"--user={os.getuid()}", f"--format={fields}"]
    rows = [line.partition(SEPARATOR) for line in ask(queue, timeout_s).splitlines()]
    found = {job for job, _, command in rows if script.name in command and job.isdigit()}
    if not found:
        found = _in_accounting(script, timeout_s)
    return sorted(found, key=int)


def _in_accounting(script: Path, timeout_s: float) -> set[str]:
    """A job so short that squeue has forgotten it. Without accounting, or before 21.08, there is none to be found."""
    asked = ["sacct", "--noheader", "--allocations", "--parsable2", f"--delimiter={SEPARATOR}"]
    try:
        said = ask([*asked, "--starttime=now-1hours", "--format=JobIDRaw,SubmitLine"], timeout_s)
    except SchedulerError:
        return set()
    rows = [line.partition(SEPARATOR) for line in said.splitlines()]
    return {job for job, _, command in rows if script.name in command and job.isdigit()}


def _run_sbatch(
    command: list[str], environ: dict[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """In a session of its own: ^C must not leave it between asking and telling."""
    try:
        return subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        said = f"sbatch: Socket timed out: no answer within {timeout_s:.0f} s"
        return subprocess.CompletedProcess(command, 1, "", said)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("sbatch: ").removeprefix("error: ") if lines else "no answer"
