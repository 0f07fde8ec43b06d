"""Queue the scripts of a run: one job, or several of which all are queued or none; or start one on this machine.

    submit_script(run, run.job_script, "slurm")
    with together() as jobs:                        # none starts before the last one is in the queue
        first = jobs.submit(run, script)
        jobs.submit(run, script, f"--dependency=afterany:{first}")

`SlurmRunExecutor` passes ``launch/job.sbatch`` to sbatch; `LocalRunExecutor` runs the same file under submitit's local
controller. Both return a submitit job with the same interface (id, state, cancellation). The overridden methods are
private to submitit, which is why its version is pinned exactly.

The first of several jobs is held meanwhile: control/job.json, which it and the later ones read, can be completed before
any starts, and a first job that would end within milliseconds is still known to SLURM when the others name it (SLURM
22.05 treats a dependency on a job that it no longer knows as fulfilled).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.local.local import LocalExecutor, LocalJob
from submitit.slurm.slurm import SlurmExecutor

from primerl_hpc.common import env
from primerl_hpc.common.errors import OccupiedError, PrimerlError, SchedulerError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.log import notice
from primerl_hpc.common.passed import PassedVariables
from primerl_hpc.run.access.ownership import writable_by_others
from primerl_hpc.run.lock import identify_process
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm import sbatch
from primerl_hpc.slurm.command_lines import cancel_command, release_command
from primerl_hpc.slurm.commands import UnansweredError, UnknownJobError, retry_ask
from primerl_hpc.slurm.jobs import is_job_over
from primerl_hpc.slurm.partitions import ask_partitions, find_excess
from primerl_hpc.slurm.refusals import explain_refusal
from primerl_hpc.slurm.sbatch import DEFAULT, JOB_PREFIXES, RefusedError, components_of, find_jobs

SBATCH_TIMEOUT_S = 120.0
"""sbatch itself retries for a while; after this time it counts as unanswered."""
SBATCH_PATIENCE_S = 300.0
"""How long sbatch is repeated while SLURM does not answer."""
_YEAR_MIN = 60 * 24 * 365
PATIENCE_S = 120.0
"""How long scancel and scontrol are repeated."""
_PARTS = "parts"
"""Folder of the files that were submitted as one of several jobs."""
_DONE_BEFORE = re.compile("has already finished|no longer pending execution|already completing or completed")
"""SLURM's response to a retried command whose first try had succeeded, if the job has started or ended meanwhile."""


# -- one script ------------------------------------------------------------------------------------


class SlurmRunExecutor(SlurmExecutor):
    """``sbatch`` of a file rendered earlier; ``options`` override its ``#SBATCH`` lines."""

    def __init__(
        self, folder: Path, script: Path, options: Sequence[str] = (), passed: PassedVariables = DEFAULT
    ) -> None:
        super().__init__(folder)
        self.script, self.options, self.passed = script, options, passed

    def _submit_command(self, command: str) -> Any:
        """Submit like submitit, but retry until SLURM answers without ever submitting twice.

        A submission file without a job id in its name belongs to a submission whose result is unknown: its job is
        searched for first.
        """
        for pending in sorted(self.folder.glob(".submission_file_*.sh")):
            jobs = [] if pending.is_symlink() else find_jobs(pending)
            if active := [job for job in jobs if not is_job_over(job)]:
                return self._adopt(active[0], pending)
        return self._job(*_submit_copy(self.script, self.folder, self.options, self.passed))

    def _adopt(self, job_id: str, submission: Path) -> Any:
        if self.options:  # a job of a chain has its own dependencies
            raise OccupiedError(
                f"job {job_id} of this run is still queued from an earlier submission",
                hint=f"cancel it: scancel {job_id}",
            )
        _print(f"job {job_id} is still queued from an earlier submission")
        return self._job(job_id, submission)

    def _job(self, job_id: str, submission: Path) -> Any:
        job = self.job_class(folder=self.folder, job_id=job_id, tasks=[0])
        job.paths.move_temporary_file(submission, "submission_file", keep_as_symlink=True)
        return job


def _print(text: str) -> None:
    print(f"sbatch: {text}", file=sys.stderr)


def _submit_copy(
    script: Path, folder: Path, options: Sequence[str], passed: PassedVariables
) -> tuple[str, Path]:
    """Submit a copy of ``script`` exactly once (`slurm/sbatch.py`); return the job's id and the copy in ``folder``.

    Raises SchedulerError with the reason if SLURM refuses, UnansweredError if it never answers.
    """
    try:
        return sbatch.submit_once(
            script,
            folder,
            options,
            patience_s=SBATCH_PATIENCE_S,
            timeout_s=SBATCH_TIMEOUT_S,
            report=_print,
            passed=passed,
        )
    except RefusedError as error:
        raise explain_refusal(error.output, components_of(script.read_text()), ask_partitions) from None


class LocalRunExecutor(LocalExecutor):
    """``bash`` of the same file, run by submitit's local controller process."""

    def __init__(self, folder: Path, script: Path, environ: Mapping[str, str]) -> None:
        super().__init__(folder)
        self.script, self.environ = script, environ

    def _submit_command(self, command: str) -> Any:
        """Start submitit's controller in its own session.

        submitit itself starts it in the process group of the terminal. A ^C there, or the signal that timeout(1) sends
        to its group, would reach the supervisor, which stops the run. The standard streams are redirected to
        controller.log: a local run must not keep the terminal or the pipes of the command that started it open.
        """
        with (self.folder / "controller.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "submitit.local._local", str(self.folder)],
                env={**self.environ, **_controller_variables(command)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return LocalJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=[0])

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join(["bash", str(self.script)])


def _controller_variables(command: str) -> dict[str, str]:
    """Return the variables that ``submitit.local.local.start_controller`` passes on, for one task on one node.

    ``CUDA_VISIBLE_DEVICES`` is inherited: submitit would hide GPUs that it cannot count (no variable, UUIDs, MIG).
    """
    return {
        "SUBMITIT_LOCAL_NTASKS": "1",
        "SUBMITIT_LOCAL_COMMAND": command,
        "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * _YEAR_MIN),
        "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "30",
        "SUBMITIT_LOCAL_NODEID": "0",
        "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
        "SUBMITIT_STDERR_TO_STDOUT": "1",
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_WITH_SHELL": "",
    }


def submit_script(run: RunDir, script: Path, scheduler: str, options: Sequence[str] = ()) -> dict[str, Any]:
    """Submit a script; return ``{"scheduler", "job_id"}``, and what identifies the process of a local run.

    ``options`` are passed to sbatch.

    Raises SchedulerError with the reason if it is refused, UnansweredError if it is unknown whether the job is queued.
    """
    # one folder per script: a submission whose result is unknown is searched for among those of the same script
    folder = run.launch / ("submitit" if script.stem == "job" else f"submitit-{script.stem}")
    if scheduler == "slurm":
        if missing := [name for name in ("sbatch", "srun") if shutil.which(name) is None]:
            raise SchedulerError(
                f"SLURM is not installed on this machine ({' and '.join(missing)} not in PATH)",
                hint="submit from a login node, or use --profile local",
            )
        folder = folder / _PARTS if options else folder
        job = SlurmRunExecutor(folder, script, options, _passed(run))._submit_command("")
        return {"scheduler": scheduler, "job_id": job.job_id}
    job = _submit_here(folder, script, environ_here(_passed(run)))
    return {"scheduler": scheduler, "job_id": job.job_id, **identify_process(int(job.job_id))}


def excess_of(script: Path) -> str | None:
    """Return what the job exceeds in its partition, and what would admit it; None if it fits or cannot be checked."""
    text = script.read_text()
    if shutil.which("sinfo") is None:
        return None
    excess = find_excess(components_of(text), ask_partitions())
    return None if excess is None else f"{excess.what}; {excess.remedy}"


def start_here(run: RunDir, script: Path, num_nodes: int) -> dict[str, Any]:
    """Start a script as a background process in the current allocation; return ``{"scheduler", "job_id", "here"}``.

    Raises SchedulerError outside of an allocation, and if it has fewer than ``num_nodes`` nodes.
    """
    allocation = env.slurm_allocation()
    if allocation is None:
        raise SchedulerError(
            "this shell is not in an allocation: SLURM_JOB_ID is not set",
            hint=f"start one: salloc --nodes={num_nodes} …; or submit without --here",
        )
    job, present = allocation
    if present < num_nodes:
        raise SchedulerError(
            f"the run needs {num_nodes} nodes, and the allocation of job {job} has {present}",
            hint=f"start a larger one (salloc --nodes={num_nodes}), or reduce layout in the recipe",
        )
    output = run.job_outputs(job)[0]
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("ab") as log:
        subprocess.Popen(
            ["bash", str(script)],
            env=environ_here(_passed(run)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return {"scheduler": "slurm", "job_id": job, "here": True}


def environ_here(passed: PassedVariables) -> dict[str, str]:
    """Return the variables of this shell for a run that starts on this machine.

    Those of the allocation are kept: the run starts steps in it. TMPDIR is left out if it cannot be used, as that of a
    job that has ended.
    """
    environ = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(JOB_PREFIXES) or passed.passes(name, value)
    }
    if (folder := environ.get("TMPDIR")) is not None and not _is_usable(Path(folder)):
        notice(
            f"warning: the run does not use TMPDIR={folder}: you cannot write it, or others can replace files in it"
        )
        del environ["TMPDIR"]
    return environ


def _is_usable(folder: Path) -> bool:
    """True for a folder that this user can write, and in which others cannot replace files."""
    try:
        found = folder.stat()
        is_safe = found.st_uid in (os.geteuid(), 0) and writable_by_others(folder) is None
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and is_safe and os.access(folder, os.W_OK | os.X_OK)


def _passed(run: RunDir) -> PassedVariables:
    """Return the rule of the run's profile about variables of the submitting shell."""
    plan = read_json_or_none(run.plan) or {}
    return PassedVariables(tuple(plan.get("submit_keep") or ()), tuple(plan.get("submit_drop", ())))


def _submit_here(folder: Path, script: Path, environ: Mapping[str, str]) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    executor = LocalRunExecutor(folder, script, environ)
    try:
        return executor._submit_command(executor._submitit_command_str)
    except (utils.FailedJobError, utils.FailedSubmissionError, OSError) as error:
        raise SchedulerError(f"the job could not be started: {str(error).strip()}") from error


# -- several jobs, all or none ---------------------------------------------------------------------


class JobsTogether:
    def __init__(self) -> None:
        self.ids: list[str] = []

    def submit(self, run: RunDir, script: Path, *options: str) -> str:
        """Submit the script; return the job's id. Raises SchedulerError if it is refused."""
        held = () if self.ids else ("--hold",)
        job = str(submit_script(run, script, "slurm", [*held, *options])["job_id"])
        self.ids.append(job)
        return job

    def submit_links(self, run: RunDir, script: Path, count: int) -> list[str]:
        """Submit ``count`` jobs in a row; return their ids. Each waits for all jobs before it: otherwise
        the cancellation of a waiting job would start the next one while another is still running."""
        links: list[str] = []
        for _ in range(count):
            wait = (f"--dependency=afterany:{':'.join(links)}",) if links else ()
            links.append(self.submit(run, script, *wait))
        return links


def interrupted_jobs(run: RunDir, known: Collection[str]) -> dict[str, float]:
    """Return the jobs of submissions of several that were killed before control/job.json listed them, with the time.

    The first of them is held, and the others wait for it, so none would ever start. ``known``: jobs in
    control/job.json. Raises SchedulerError if a submission's result is unknown, and SLURM does not report its job.
    """
    found: dict[str, float] = {}
    for folder in (run.launch, run.evaluation.launch):
        for copy in folder.glob(f"submitit*/{_PARTS}/.submission_file_*.sh"):
            jobs = [Path(os.readlink(copy)).name.partition("_")[0]] if copy.is_symlink() else find_jobs(copy)
            found |= {job: copy.lstat().st_mtime for job in jobs if job not in known}
    return found


class _UncertainError(UnansweredError):
    """All jobs are in the queue, and may have started."""


@contextmanager
def together() -> Iterator[JobsTogether]:
    """Start the jobs that are submitted in the block when it ends; cancel them if it fails.

    Raises UnansweredError if SLURM does not answer whether they were started, or does not cancel them.
    """
    jobs = JobsTogether()
    try:
        yield jobs
        _release(jobs.ids[0])
    except BaseException as error:
        if not isinstance(error, _UncertainError):  # in that case they may be running
            _cancel_submitted(jobs.ids, error)
        raise


def _release(job: str) -> None:
    try:
        _insist(release_command(job))
    except UnansweredError as error:
        raise _UncertainError(
            f"SLURM did not answer whether it released job {job}, the first of those submitted ({error.cause})",
            hint=f"when SLURM answers again, run: scontrol release {job}",
        ) from None
    except SchedulerError as error:
        raise SchedulerError(
            f"SLURM does not permit you to release job {job}, the first of several submitted together ({error.cause})",
            hint="chains, `after` and elastic engines need `scontrol release`: ask the site to permit it, or submit "
            "without them; no job of this run is left in the queue",
        ) from None


def _cancel_submitted(ids: list[str], why: BaseException) -> None:
    try:
        drop_jobs(ids)
    except SchedulerError as error:
        cause, details = (why.cause, why.details) if isinstance(why, PrimerlError) else (str(why), "")
        raise UnansweredError(
            f"{cause or type(why).__name__}; jobs submitted earlier are still queued ({error.cause})",
            hint=f"when SLURM answers again, run: scancel {' '.join(ids)}",
            details=details,
        ) from why


def drop_jobs(ids: list[str]) -> None:
    """Cancel jobs. Raises SchedulerError if scancel refuses or is missing, UnansweredError if it never answers."""
    if ids:
        _insist(cancel_command(ids))


def _insist(command: list[str]) -> None:
    """Run the command until SLURM answers; it may already have taken effect by an earlier try or by the job's own end.

    Raises SchedulerError if SLURM refuses, UnansweredError if it does not answer for `PATIENCE_S`.
    """
    try:
        retry_ask(command, limit_s=PATIENCE_S, before_pause=_report_retry)
    except UnansweredError:
        raise
    except UnknownJobError:
        return  # it has ended
    except SchedulerError as error:
        if not _DONE_BEFORE.search(error.cause):
            raise


def _report_retry(error: Exception | None, pause_s: float) -> None:
    print(f"{error}; retrying in {pause_s:.0f} s", file=sys.stderr)
