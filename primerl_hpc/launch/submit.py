"""From a recipe and a profile to a queued run; and from a stopped run to its next attempt."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from primerl_hpc.cluster.load import LoadedProfile, load_profile
from primerl_hpc.common.errors import ConfigError, OccupiedError, PrimerlError, SchedulerError
from primerl_hpc.common.files import read_json_or_none, write_json, write_text
from primerl_hpc.common.lock import is_owner_alive, is_owner_over
from primerl_hpc.common.names import RunState
from primerl_hpc.common.registry import register_run
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.slurm import JobFact
from primerl_hpc.launch.after import (
    after_of,
    check_after,
    discard_after,
    local_script,
    note_local_after,
    prepare_after,
    queue_after,
)
from primerl_hpc.launch.chain import ChainRequest, check_chain, drop_jobs, together
from primerl_hpc.launch.executor import submit_script
from primerl_hpc.launch.fork import import_checkpoint
from primerl_hpc.launch.hub_cache import uncached_models
from primerl_hpc.launch.prepare import (
    claim_run_dir,
    clear_run_dir,
    compile_for,
    engines_script,
    freeze,
    job_script,
    make_engines_script,
    make_script,
    preview,
)
from primerl_hpc.launch.sbatch import UnansweredError
from primerl_hpc.observe.slurm import JobWatcher
from primerl_hpc.observe.snapshot import is_of_job
from primerl_hpc.plan.types import Plan, load_plan
from primerl_hpc.recipe.after_schema import After
from primerl_hpc.recipe.load import LoadedRecipe

_OF_THE_PLAN = frozenset(("scheduler.type", "scheduler.srun_extra"))
ONE_JOB = ChainRequest()


@dataclass(frozen=True)
class Submitted:
    run: RunDir
    plan: Plan
    job_id: str
    links: tuple[str, ...] = ()
    """All jobs of a chain."""


def prepare_run(
    loaded: LoadedRecipe, profile: LoadedProfile, run_dir: Path | None, chain: ChainRequest = ONE_JOB
) -> tuple[RunDir, Plan]:
    """A frozen run directory that waits for ``sbatch launch/job.sbatch``. Everything is checked before it is made."""
    check_run(loaded, profile, chain, run_dir)
    was_there = _is_there(run_dir)
    run = claim_run_dir(loaded.recipe.name, profile, run_dir)
    try:
        plan = compile_for(loaded, profile, run.root)
        import_checkpoint(run, plan.phases[-1].recipe)
        freeze(run, loaded, profile, plan, make_script(plan, profile))
        prepare_after(run, plan, profile)
    except BaseException:
        clear_run_dir(run.root, keep_root=was_there)
        raise
    register_run(run)
    return run, plan


def check_run(
    loaded: LoadedRecipe,
    profile: LoadedProfile,
    chain: ChainRequest = ONE_JOB,
    run_dir: Path | None = None,
) -> Plan:
    """The plan as it would be, after all that is checked before a run directory is made.

    Raises ConfigError, OccupiedError, NotFoundError, DataError.
    """
    plan = preview(loaded, profile) if run_dir is None else compile_for(loaded, profile, run_dir)
    check_chain(chain, plan)
    check_after(plan, profile)
    check_keys(plan, profile)
    for name in uncached_models(plan, profile.profile):
        print(
            f"warning: the nodes of profile '{profile.profile.name}' are offline, and {name} lies in no cache here; "
            "download it first (hf download), or give a folder",
            file=sys.stderr,
        )
    return plan


def check_keys(plan: Plan, profile: LoadedProfile) -> None:
    """Raises ConfigError when a server elsewhere needs a key that the job, which gets this environment, would not have.

    Setup lines of the profile may export it there: then nobody can know before.
    """
    if profile.profile.software.setup:
        return
    for phase in plan.phases:
        if (evaluation := phase.recipe.evaluation) is not None and evaluation.external is not None:
            evaluation.external.key()
        for model in (phase.recipe.teacher, phase.recipe.judge):
            if model is not None:
                model.key()


def submit_run(
    loaded: LoadedRecipe, profile: LoadedProfile, run_dir: Path | None, chain: ChainRequest = ONE_JOB
) -> Submitted:
    """Prepare and queue. A refused submission leaves no run directory behind; an unanswered one keeps it."""
    was_there = _is_there(run_dir)
    run, plan = prepare_run(loaded, profile, run_dir, chain)
    try:
        return queue_run(run, plan, chain)
    except UnansweredError:
        raise  # its job may be in the queue, and needs its folder
    except PrimerlError:
        discard_after(run, plan)
        clear_run_dir(run.root, keep_root=was_there)
        raise


def _is_there(run_dir: Path | None) -> bool:
    return run_dir is not None and run_dir.expanduser().exists()


def resume_run(run: RunDir, chain: ChainRequest = ONE_JOB) -> Submitted:
    """Queue the next attempt of a run that is not running.

    Raises OccupiedError when it runs or waits in the queue, or is done.
    """
    plan = load_plan(run)
    check_chain(chain, plan)
    check_not_running(run)
    state = read_json_or_none(run.state) or {}
    if state.get("state") == RunState.DONE:
        raise OccupiedError("this run is done", place=str(run.root), mend="submit a new one to train further")
    register_run(run)
    return queue_run(run, plan, chain)


def change_job(run: RunDir, changes: Sequence[str]) -> None:
    """Write the script anew with changes in the profile's ``scheduler`` (``scheduler.time=60``).

    The plan stays, but for the margin before the walltime.

    Raises ConfigError for a change of anything else, OccupiedError while the run goes on.
    """
    plan = load_plan(run)
    check_not_running(run)
    check_job_changes(changes)
    profile = load_profile(str(run.profile), overrides=changes, environ={})
    margin_s = profile.profile.scheduler.signal_margin_s
    if plan.signal_margin_s not in (None, margin_s):
        plan = plan.model_copy(update={"signal_margin_s": margin_s})
        write_json(run.plan, plan.model_dump(mode="json"))
    write_text(job_script(run), make_script(plan, profile), mode=0o755)
    if plan.num_elastic:
        write_text(engines_script(run), make_engines_script(plan, profile), mode=0o755)
    write_text(run.profile, profile.text)


def check_job_changes(changes: Sequence[str]) -> None:
    """Raises ConfigError for a key of the profile that a prepared plan was made with."""
    for text in changes:
        key = text.partition("=")[0].strip()
        if not key.startswith("scheduler.") or key in _OF_THE_PLAN:
            raise ConfigError(
                f"{key} cannot change between attempts: the plan was made with it",
                mend="what sbatch is asked can: scheduler.time, scheduler.partition, …; or submit anew",
            )


def check_not_running(run: RunDir) -> None:
    """Raises OccupiedError when a supervisor works on the run, or a job that would do so waits in the queue;
    UnansweredError when SLURM does not say."""
    owner = read_json_or_none(run.supervisor_lock)
    if is_owner_alive(owner, run.supervisor_lock) and not is_owner_over(owner):
        raise OccupiedError("this run is running", place=str(run.root), mend=f"primerl-hpc status {run.root}")
    job, state = read_json_or_none(run.job) or {}, read_json_or_none(run.state) or {}
    jobs = JobWatcher()
    facts = jobs.facts_of([run])
    if jobs.trouble is not None:
        raise UnansweredError(
            f"nobody knows whether a job of this run is in the queue: {jobs.trouble}",
            place=str(run.root),
            mend="try again when SLURM answers",
        )
    written = state.get("state")
    has_ended = is_of_job(state, job) and written in set(RunState) and RunState(written).is_final
    for link in job.get("links") or [job.get("job_id")]:
        if (does := _holds(facts.get(link), has_ended=has_ended)) is not None:
            raise OccupiedError(
                f"job {link} of this run {does}",
                place=str(run.root),
                mend=f"to start it anew: primerl-hpc cancel {run.root.name}",
            )


def _holds(fact: JobFact | None, *, has_ended: bool) -> str | None:
    """What a job does that will work on its run, or does. ``has_ended``: its supervisor said so, and a job that runs on ends too."""
    if fact is not None and fact.is_waiting:
        return "waits in the queue"
    if fact is not None and fact.state == "SUSPENDED":
        return "is suspended"
    return "is running" if fact is not None and fact.state == "RUNNING" and not has_ended else None


def queue_run(run: RunDir, plan: Plan, chain: ChainRequest = ONE_JOB) -> Submitted:
    """Queue the next attempt of a run directory that is frozen and not in use."""
    # known before the job can start: which attempt it will be tells its state from an earlier one's
    attempt = int((read_json_or_none(run.state) or {}).get("attempt", 0)) + 1
    facts = {"attempt": attempt, "submitted": round(time.time(), 3), "earlier": _earlier_jobs(run)}
    run.stop_request.unlink(missing_ok=True)  # an earlier wish, which this one overrules
    if plan.scheduler == "local":
        job = submit_script(run, local_script(run, plan), plan.scheduler)
        write_json(run.job, {**job, **facts, "after": note_local_after(run, plan, job)})
        return Submitted(run, plan, job["job_id"])
    if not chain.is_chain and after_of(plan) == After() and not plan.num_elastic:
        job = submit_script(run, job_script(run), plan.scheduler)
        write_json(run.job, {**job, **facts})
        return Submitted(run, plan, job["job_id"])
    if engines := (read_json_or_none(run.job) or {}).get("engines_job_id"):
        with contextlib.suppress(SchedulerError):  # one of them may still wait in the queue
            drop_jobs([engines])
    drop_jobs(_after_jobs(run))  # of an attempt that failed, if SLURM has not taken them out itself
    with together() as jobs:
        links = jobs.submit_links(run, job_script(run), chain.links)
        facts["after"] = queue_after(run, plan, jobs, links)
        if chain.is_chain:
            facts |= {"links": links, "until_done": chain.is_until_done}
        job = {"scheduler": plan.scheduler, "job_id": links[0], **facts}
        write_json(run.job, job)
        if (
            plan.num_elastic
        ):  # after the attempt is known: they would take the end of an earlier one for that of this
            write_json(run.job, {**job, "engines_job_id": jobs.submit(run, engines_script(run))})
    return Submitted(run, plan, links[0], tuple(links))


def _after_jobs(run: RunDir) -> list[str]:
    return [each["job_id"] for each in (read_json_or_none(run.job) or {}).get("after", {}).values()]


def _earlier_jobs(run: RunDir) -> list[str]:
    job = read_json_or_none(run.job) or {}
    return [*job.get("earlier", ()), *(job.get("links") or [job["job_id"]])] if job else []
