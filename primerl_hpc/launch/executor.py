"""submitit, with our rendered script as the submission file.

`SlurmRunExecutor` hands ``launch/job.sbatch`` to sbatch; `LocalRunExecutor` runs the very same file under submitit's
local controller. Both return a submitit job: id, state and cancellation look alike. The overridden methods are
private to submitit, which is why its version is pinned exactly.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.local.local import LocalExecutor
from submitit.slurm.slurm import SlurmExecutor

from primerl_hpc.common.errors import OccupiedError, SchedulerError
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.sbatch import find_jobs
from primerl_hpc.common.slurm import is_job_over
from primerl_hpc.launch.sbatch import submit_copy

_YEAR_MIN = 60 * 24 * 365


class SlurmRunExecutor(SlurmExecutor):
    """``sbatch`` of a file that was rendered before; ``options`` win over its ``#SBATCH`` lines."""

    def __init__(self, folder: Path, script: Path, options: Sequence[str] = ()) -> None:
        super().__init__(folder)
        self.script, self.options = script, options

    def _submit_command(self, command: str) -> Any:
        """As submitit's own, with a submission that is repeated until SLURM answers and never taken twice.

        A submission file that has no job id in its name yet is one whose fate was not learned: its job is looked for.
        """
        for unsure in sorted(self.folder.glob(".submission_file_*.sh")):
            jobs = [] if unsure.is_symlink() else find_jobs(unsure)
            if alive := [job for job in jobs if not is_job_over(job)]:
                return self._adopt(alive[0], unsure)
        return self._job(*submit_copy(self.script, self.folder, self.options, say=_say))

    def _adopt(self, job_id: str, submission: Path) -> Any:
        if self.options:  # a link of a chain has its own place in it
            raise OccupiedError(
                f"job {job_id} of this run is in the queue from an earlier submission",
                mend=f"scancel {job_id}",
            )
        _say(f"job {job_id} is in the queue from an earlier submission")
        return self._job(job_id, submission)

    def _job(self, job_id: str, submission: Path) -> Any:
        job = self.job_class(folder=self.folder, job_id=job_id, tasks=[0])
        job.paths.move_temporary_file(submission, "submission_file", keep_as_symlink=True)
        return job


def _say(text: str) -> None:
    print(f"sbatch: {text}", file=sys.stderr)


class LocalRunExecutor(LocalExecutor):
    """``bash`` of the same file, watched by submitit's local controller process."""

    def __init__(self, folder: Path, script: Path) -> None:
        super().__init__(folder)
        self.script = script
        self.update_parameters(timeout_min=_YEAR_MIN, stderr_to_stdout=True)

    @property
    def _submitit_command_str(self) -> str:
        """submitit hides GPUs that it cannot count (no variable, UUIDs, MIG): the run is to see those that are seen here."""
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = ["-u", "CUDA_VISIBLE_DEVICES"] if devices is None else [f"CUDA_VISIBLE_DEVICES={devices}"]
        return shlex.join(["env", *seen, "bash", str(self.script)])


def submit_script(run: RunDir, script: Path, scheduler: str, options: Sequence[str] = ()) -> dict[str, Any]:
    """Hand the script over; returns ``{"scheduler", "job_id"}``. ``options`` are sbatch's.

    Raises SchedulerError with what was refused and why, UnansweredError when the job may be in the queue or not.
    """
    # a folder per script: a submission whose fate was not learned is looked for among those of the same script
    folder = run.launch / ("submitit" if script.stem == "job" else f"submitit-{script.stem}")
    if scheduler == "slurm":
        if missing := [name for name in ("sbatch", "srun") if shutil.which(name) is None]:
            raise SchedulerError(
                f"no SLURM on this machine ({' and '.join(missing)} not in PATH)",
                mend="submit from a login node, or use --profile local",
            )
        job = SlurmRunExecutor(folder, script, options)._submit_command("")
    else:
        job = _submit_here(folder, script)
    return {"scheduler": scheduler, "job_id": job.job_id}


def _submit_here(folder: Path, script: Path) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    executor = LocalRunExecutor(folder, script)
    try:
        with _detached_children(folder / "controller.log"):
            return executor._submit_command(executor._submitit_command_str)
    except (utils.FailedJobError, utils.FailedSubmissionError, OSError) as error:
        raise SchedulerError(f"submission was refused: {str(error).strip()}") from error


@contextmanager
def _detached_children(output: Path) -> Iterator[None]:
    """A local run must outlive ^C and hang-ups of the terminal that started it, and must not hold its pipes open.

    submitit starts its controller with what this process has: so for that moment the signals are ignored, and the
    standard streams lead elsewhere.
    """
    numbers = (signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(fd) for fd in (0, 1, 2)]
    with open(os.devnull, "rb") as nothing, output.open("ab") as log:
        for fd, file in ((0, nothing), (1, log), (2, log)):
            os.dup2(file.fileno(), fd)
    try:
        yield
    finally:
        for fd, original in enumerate(kept):
            os.dup2(original, fd)
            os.close(original)
        for number, handler in before.items():
            signal.signal(number, handler)
