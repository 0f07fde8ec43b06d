"""Submit several jobs together: all or none, and none starts before the last one is in the queue.

    with together() as jobs:
        first = jobs.submit(run, script)
        jobs.submit(run, script, f"--dependency=afterany:{first}")

The first job is held meanwhile: control/job.json, which it and the later ones read, can be completed before any starts,
and a first job that would end within milliseconds is still known to SLURM when the others name it (SLURM 22.05 treats a
dependency on a job that it no longer knows as fulfilled).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from primerl_hpc.common.errors import ConfigError, PrimerlError, SchedulerError
from primerl_hpc.common.names import Kind
from primerl_hpc.launch.executor import submit_script
from primerl_hpc.plan.types import Plan
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.command_lines import cancel_command, release_command
from primerl_hpc.slurm.commands import UnansweredError, UnknownJobError, retry_ask

MOST_LINKS = 100
PATIENCE_S = 120.0
"""How long a command is repeated while SLURM does not answer."""
_DONE_BEFORE = re.compile("has already finished|no longer pending execution|already completing or completed")
"""SLURM's response to a retried command whose first try had succeeded, if the job has started or ended meanwhile."""


@dataclass(frozen=True)
class ChainRequest:
    """The user's request: ``links`` jobs in a row, or one more after each until the run is done."""

    links: int = 1
    is_until_done: bool = False
    is_here: bool = False
    """The run starts in the allocation of this shell, without sbatch."""
    budget: str | None = None
    """Hours that all attempts of the run may use, ``500GPUh``; None: the budget that the run has, if any."""

    @property
    def is_chain(self) -> bool:
        return self.links > 1 or self.is_until_done


def check_chain(request: ChainRequest, plan: Plan) -> None:
    """Raise ConfigError if the request contradicts itself, the profile or the recipe."""
    if request.is_here and plan.scheduler != "slurm":
        hint = "omit --here: this profile starts runs on this machine anyway"
        raise ConfigError("--here needs a profile whose scheduler.type is slurm", hint=hint)
    has_more = plan.num_elastic or plan.phases[-1].recipe.after is not None
    if request.is_here and (request.is_chain or has_more):
        raise ConfigError(
            "--here starts one job: it excludes --chain, --until-done, elastic engines and after:"
        )
    if not request.is_chain:
        return
    if request.links > 1 and request.is_until_done:
        raise ConfigError("--chain and --until-done cannot be combined", hint="use one of them")
    if plan.scheduler != "slurm":
        raise ConfigError(
            f"profile '{plan.profile_name}' has no walltime, so one job is sufficient",
            hint="remove --chain and --until-done",
        )
    if plan.kind not in (Kind.RL, Kind.SFT):
        raise ConfigError(
            f"a chain continues from checkpoints, but a run of kind {plan.kind.value} writes none",
            hint="increase scheduler.time in the profile instead",
        )
    if plan.num_elastic:
        raise ConfigError(
            "elastic engines belong to one job, which continues by requeue",
            hint="remove --chain and --until-done",
        )
    if not 1 <= request.links <= MOST_LINKS:
        raise ConfigError(f"--chain {request.links} is out of range: use 1 to {MOST_LINKS}")


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
