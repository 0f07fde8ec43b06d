"""Several jobs queued as one: all of them or none, and none starts before the last one is in the queue.

    with together() as jobs:
        first = jobs.submit(run, script)
        jobs.submit(run, script, f"--dependency=afterany:{first}")

The first is held meanwhile: what it and the later ones read about each other (control/job.json) can be written in peace,
and a first job that ends within milliseconds is still known to SLURM when the others name it (22.05 takes a dependency
on a job that it has forgotten for fulfilled).
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from primerl_hpc.common.errors import ConfigError, SchedulerError
from primerl_hpc.common.names import Kind
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.slurm import ask
from primerl_hpc.launch.executor import submit_script
from primerl_hpc.plan.types import Plan

MOST_LINKS = 100


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


@contextmanager
def together() -> Iterator[JobsTogether]:
    """Jobs that are queued inside start when the block is over; when it fails, they are taken out again."""
    jobs = JobsTogether()
    try:
        yield jobs
        ask(["scontrol", "release", jobs.ids[0]])
    except BaseException:
        drop_jobs(jobs.ids)
        raise


def drop_jobs(ids: list[str]) -> None:
    """Raises SchedulerError when scancel refuses or is not here."""
    if not ids:
        return
    try:
        done = subprocess.run(["scancel", *ids], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SchedulerError(
            "scancel is not on this machine", mend="cancel from a login node of the cluster"
        ) from None
    if done.returncode:
        raise SchedulerError(f"scancel refused: {done.stderr.strip()}")
