"""Several jobs queued as one: all of them or none, and none starts before the last one is in the queue.

    with together() as jobs:
        first = jobs.submit(run, script)
        jobs.submit(run, script, f"--dependency=afterany:{first}")

The first is held meanwhile: what it and the later ones read about each other (control/job.json) can be written in peace,
and a first job that ends within milliseconds is still known to SLURM when the others name it (22.05 takes a dependency
on a job that it has forgotten for fulfilled).
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from primerl_hpc.common.errors import ConfigError, SchedulerError
from primerl_hpc.common.names import Kind
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.sbatch import FIRST_PAUSE_S, LAST_PAUSE_S
from primerl_hpc.common.slurm import UnansweredError, ask
from primerl_hpc.launch.executor import submit_script
from primerl_hpc.plan.types import Plan

MOST_LINKS = 100
PATIENCE_S = 120.0
"""How long a SLURM that does not answer is asked again."""
_DONE_ALREADY = re.compile("has already finished|no longer pending execution|already completing or completed")
"""What SLURM says to the second try when it had taken the first, and the job has come and gone meanwhile."""


@dataclass(frozen=True)
class ChainRequest:
    """What a user asked for: ``links`` jobs in a row, or one more after each until the run is done."""

    links: int = 1
    is_until_done: bool = False

    @property
    def is_chain(self) -> bool:
        return self.links > 1 or self.is_until_done


def check_chain(request: ChainRequest, plan: Plan) -> None:
    """Raises ConfigError when a chain makes no sense for this run."""
    if not request.is_chain:
        return
    if request.links > 1 and request.is_until_done:
        raise ConfigError("--chain and --until-done exclude each other", mend="give one of them")
    if plan.scheduler != "slurm":
        raise ConfigError(
            f"profile '{plan.profile_name}' has no walltime, so one job is enough",
            mend="leave --chain and --until-done out",
        )
    if plan.kind not in (Kind.RL, Kind.SFT):
        raise ConfigError(
            f"a chain goes on from checkpoints, and a run of kind {plan.kind.value} makes none",
            mend="raise scheduler.time in the profile instead",
        )
    if plan.num_elastic:
        raise ConfigError(
            "elastic engines belong to one job, which goes on by requeue",
            mend="leave --chain and --until-done out",
        )
    if not 1 <= request.links <= MOST_LINKS:
        raise ConfigError(f"--chain takes 1 to {MOST_LINKS} links")


class JobsTogether:
    def __init__(self) -> None:
        self.ids: list[str] = []

    def submit(self, run: RunDir, script: Path, *options: str) -> str:
        """The job's id. Raises SchedulerError when it is refused."""
        held = () if self.ids else ("--hold",)
        job = str(submit_script(run, script, "slurm", [*held, *options])["job_id"])
        self.ids.append(job)
        return job

    def submit_links(self, run: RunDir, script: Path, count: int) -> list[str]:
        """``count`` jobs in a row. Each waits for all before it, or cancelling a link that waits would let the next
        one start beside the one that runs."""
        links: list[str] = []
        for _ in range(count):
            wait = (f"--dependency=afterany:{':'.join(links)}",) if links else ()
            links.append(self.submit(run, script, *wait))
        return links


class _UnsureError(UnansweredError):
    """The jobs are complete in the queue, and may have started."""


@contextmanager
def together() -> Iterator[JobsTogether]:
    """Jobs that are queued inside start when the block is over; when it fails, they are taken out again.

    Raises UnansweredError when SLURM does not say whether they started, or does not let them be taken out.
    """
    jobs = JobsTogether()
    try:
        yield jobs
        _release(jobs.ids[0])
    except BaseException as error:
        if not isinstance(error, _UnsureError):  # then they may run
            _take_back(jobs.ids, error)
        raise


def _release(job: str) -> None:
    try:
        _insist(["scontrol", "release", job])
    except UnansweredError as error:
        raise _UnsureError(
            f"SLURM did not say whether it released job {job}, the first of those queued ({error.cause})",
            mend=f"when it answers again: scontrol release {job}",
        ) from None


def _take_back(ids: list[str], why: BaseException) -> None:
    try:
        drop_jobs(ids)
    except SchedulerError as error:
        raise UnansweredError(
            f"{str(why) or type(why).__name__}; what was queued before that is in the queue still ({error.cause})",
            mend=f"when SLURM answers again: scancel {' '.join(ids)}",
        ) from why


def drop_jobs(ids: list[str]) -> None:
    """Raises SchedulerError when scancel refuses or is not here, UnansweredError when it never answers."""
    if ids:
        _insist(["scancel", *ids])


def _insist(command: list[str]) -> None:
    """Ask until SLURM answers; an earlier try, or the job's own end, may have brought about what is asked.

    Raises SchedulerError when it refuses, UnansweredError when it does not answer for `PATIENCE_S`.
    """
    deadline, pause_s = time.monotonic() + PATIENCE_S, FIRST_PAUSE_S
    while True:
        try:
            ask(command)
            return
        except UnansweredError as error:
            if time.monotonic() + pause_s > deadline:
                raise
            print(f"{error}; again in {pause_s:.0f} s", file=sys.stderr)
        except SchedulerError as error:
            if not _DONE_ALREADY.search(error.cause):
                raise
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)
