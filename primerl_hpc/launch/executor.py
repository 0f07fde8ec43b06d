"""submitit, with our rendered script as the submission file.

`SlurmRunExecutor` hands ``launch/job.sbatch`` to sbatch; `LocalRunExecutor` runs the very same file under submitit's
local controller. Both return a submitit job: id, state and cancellation look alike. The overridden methods are
private to submitit, which is why its version is pinned exactly.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.local.local import LocalExecutor
from submitit.slurm.slurm import SlurmExecutor

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.common.rundir import RunDir

_YEAR_MIN = 60 * 24 * 365


class SlurmRunExecutor(SlurmExecutor):
    """``sbatch`` of a file that was rendered before."""

    def __init__(self, folder: Path, script: Path) -> None:
        super().__init__(folder)
        self.script = script

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self.script.read_text()


class LocalRunExecutor(LocalExecutor):
    """``bash`` of the same file, watched by submitit's local controller process."""

    def __init__(self, folder: Path, script: Path) -> None:
        super().__init__(folder)
        self.script = script
        gpus = [int(each) for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.isdigit()]
        self.update_parameters(
            timeout_min=_YEAR_MIN, stderr_to_stdout=True, gpus_per_node=len(gpus), visible_gpus=tuple(gpus)
        )

    @property
    def _submitit_command_str(self) -> str:
        return f"bash {shlex.quote(str(self.script))}"


def submit_script(run: RunDir, script: Path, scheduler: str) -> dict[str, Any]:
    """Hand the script over; returns ``{"scheduler", "job_id"}``.

    Raises SchedulerError with the scheduler's own words.
    """
    folder = run.launch / "submitit"
    try:
        if scheduler == "slurm":
            executor: SlurmRunExecutor | LocalRunExecutor = SlurmRunExecutor(folder, script)
        else:
            executor = LocalRunExecutor(folder, script)
        folder.mkdir(parents=True, exist_ok=True)
        with _detached_children(folder / "controller.log"):
            job = executor._submit_command(executor._submitit_command_str)
    except RuntimeError as error:
        raise SchedulerError(
            "no SLURM on this machine (srun is not in PATH)",
            mend="submit from a login node, or use --profile local",
        ) from error
    except (utils.FailedJobError, utils.FailedSubmissionError, OSError) as error:
        raise SchedulerError(f"submission was refused: {str(error).strip()}") from error
    return {"scheduler": scheduler, "job_id": job.job_id}


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
