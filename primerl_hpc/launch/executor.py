"""Submit our rendered script through submitit.

`SlurmRunExecutor` passes ``launch/job.sbatch`` to sbatch; `LocalRunExecutor` runs the same file under submitit's local
controller. Both return a submitit job with the same interface (id, state, cancellation). The overridden methods are
private to submitit, which is why its version is pinned exactly.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.local.local import LocalExecutor, LocalJob
from submitit.slurm.slurm import SlurmExecutor

from primerl_hpc.common import env
from primerl_hpc.common.errors import OccupiedError, SchedulerError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.log import notice
from primerl_hpc.common.passed import PassedVariables
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm import sbatch
from primerl_hpc.slurm.jobs import is_job_over
from primerl_hpc.slurm.partitions import ask_partitions, find_excess
from primerl_hpc.slurm.refusals import explain_refusal
from primerl_hpc.slurm.sbatch import DEFAULT, JOB_PREFIXES, RefusedError, components_of, find_jobs

SBATCH_TIMEOUT_S = 120.0
"""sbatch itself retries for a while; after this time it counts as unanswered."""
SBATCH_PATIENCE_S = 300.0
"""How long a command is repeated while SLURM does not answer."""
_YEAR_MIN = 60 * 24 * 365


class SlurmRunExecutor(SlurmExecutor):
    """``sbatch`` of a file rendered earlier; ``options`` override its ``#SBATCH`` lines."""

    def __init__(
        self,
        folder: Path,
        script: Path,
        options: Sequence[str] = (),
        passed: PassedVariables = DEFAULT,
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
    """Submit a script; return ``{"scheduler", "job_id"}``. ``options`` are passed to sbatch.

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
        job = SlurmRunExecutor(folder, script, options, _passed(run))._submit_command("")
    else:
        job = _submit_here(folder, script, environ_here(_passed(run)))
    return {"scheduler": scheduler, "job_id": job.job_id}


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
            f"warning: the run does not use TMPDIR={folder}: it is no folder that only you, or owners, can change"
        )
        del environ["TMPDIR"]
    return environ


def _is_usable(folder: Path) -> bool:
    """True for a folder that this user can write, and in which others cannot replace files."""
    try:
        found = folder.stat()
    except OSError:
        return False
    is_safe = found.st_uid == os.geteuid() or bool(found.st_mode & stat.S_ISVTX)
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
