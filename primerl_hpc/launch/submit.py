"""Submit a run, from a recipe and a profile to a queued job; resume a stopped run with its next attempt."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.cluster.directives import srun_args
from primerl_hpc.cluster.load import LoadedProfile, load_profile
from primerl_hpc.common.errors import ConfigError, OccupiedError, PrimerlError, SchedulerError
from primerl_hpc.common.files import read_json_or_none, write_json, write_text
from primerl_hpc.common.log import notice
from primerl_hpc.common.names import MAIN_PHASE, RunState
from primerl_hpc.launch.chain import ChainRequest, check_chain, drop_jobs, together
from primerl_hpc.launch.code.keep import CodeChoice, choose_code, code_root, has_copy, has_module
from primerl_hpc.launch.executor import excess_of, start_here, submit_script
from primerl_hpc.launch.follow_up import (
    after_of,
    discard_after,
    local_script,
    note_local_after,
    queue_after,
)
from primerl_hpc.launch.planning.hour_budget import check_budget, with_budget
from primerl_hpc.launch.prepare import (
    claim_new_run_dir,
    claim_run_dir,
    clear_run_dir,
    engines_script,
    is_recipe_edited,
    job_script,
    next_run_dir,
)
from primerl_hpc.launch.submission import ONE_JOB, check, compose, make_scripts, write
from primerl_hpc.observe.status.job_watcher import JobWatcher
from primerl_hpc.observe.status.snapshot import is_from_latest_job
from primerl_hpc.plan.types import DEFAULT_ASK_EVERY_S, Plan, load_plan
from primerl_hpc.recipe.load import LoadedRecipe
from primerl_hpc.recipe.schema.after import After
from primerl_hpc.run.access.ownership import check_may_change, check_own
from primerl_hpc.run.job_chain import is_reused, jobs_of
from primerl_hpc.run.lock import is_owner_alive, is_owner_over
from primerl_hpc.run.registry import register_run
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.commands import UnansweredError
from primerl_hpc.slurm.jobs import JobFact, find_facts

_PLAN_SETTINGS = frozenset(("scheduler.type", "scheduler.mpi", "scheduler.srun_extra"))
"""Keys of the profile that are part of the plan, and cannot change between attempts."""


@dataclass(frozen=True)
class Submitted:
    run: RunDir
    plan: Plan
    job_id: str
    links: tuple[str, ...] = ()
    """All jobs of a chain; empty for a single job."""


def prepare_run(
    loaded: LoadedRecipe,
    profile: LoadedProfile,
    run_dir: Path | None,
    chain: ChainRequest = ONE_JOB,
    *,
    is_live: bool = False,
    make_room: Callable[[Path], None] | None = None,
) -> tuple[RunDir, Plan]:
    """Create a run directory that is ready for ``sbatch launch/job.sbatch``. Everything is checked first.

    ``is_live``: the run executes this installation or checkout, not a copy in the run directory. ``make_room`` is
    called with the run directory after all checks: it may delete an earlier run there.
    """
    existed = _exists(run_dir)
    run = None
    while run is None:  # again if another submission has claimed the same number
        root = next_run_dir(loaded.recipe.name, profile, run_dir)
        submission = compose(loaded, profile, root, budget=chain.budget, is_live=is_live)
        check(submission, chain)
        if make_room is not None:
            make_room(root)
        run = claim_new_run_dir(root, profile) if run_dir is None else claim_run_dir(root, profile)
    try:
        write(submission, run)
    except BaseException:
        clear_run_dir(run.root, keep_root=existed)
        raise
    register_run(run)
    return run, submission.plan


def submit_run(
    loaded: LoadedRecipe,
    profile: LoadedProfile,
    run_dir: Path | None,
    chain: ChainRequest = ONE_JOB,
    *,
    is_live: bool = False,
    make_room: Callable[[Path], None] | None = None,
) -> Submitted:
    """Prepare and submit a run. A refused submission leaves no run directory behind; an unanswered one keeps it.

    ``is_live`` and ``make_room`` as in `prepare_run`.
    """
    existed = _exists(run_dir)
    run, plan = prepare_run(loaded, profile, run_dir, chain, is_live=is_live, make_room=make_room)
    try:
        return queue_run(run, plan, chain)
    except UnansweredError:
        raise  # its job may be queued, and needs the directory
    except PrimerlError:
        discard_after(run, plan)
        clear_run_dir(run.root, keep_root=existed)
        raise


def _exists(run_dir: Path | None) -> bool:
    return run_dir is not None and run_dir.expanduser().exists()


def check_may_resume(run: RunDir) -> None:
    """Raise OccupiedError for another user's run, and for one that is running or queued."""
    _check_own(run)
    check_not_running(run)


def check_next_attempt(run: RunDir, chain: ChainRequest, changes: Sequence[str]) -> None:
    """Raise what would refuse the next attempt, before the first change to the run's files.

    ``changes``: as in `change_job`. Raises ConfigError, OccupiedError or UnansweredError.
    """
    check_may_resume(run)
    plan = with_budget(load_plan(run), chain.budget)
    check_chain(chain, plan)
    check_budget(run, plan)
    if changes:
        _changed_profile(run, changes)


def resume_run(
    run: RunDir,
    chain: ChainRequest = ONE_JOB,
    code: CodeChoice = CodeChoice.KEPT,
    *,
    is_changed: bool = False,
) -> Submitted:
    """Submit the next attempt of a run that is not running.

    ``is_changed``: the run was rewound or its recipe changed, so that a run that was done may have steps left.

    Raises OccupiedError if it is running, queued or done.
    """
    check_may_resume(run)
    plan = with_budget(load_plan(run), chain.budget)
    check_chain(chain, plan)
    check_budget(run, plan)
    state = read_json_or_none(run.state) or {}
    if state.get("state") == RunState.DONE and not (is_changed and _has_steps_left(run, plan)):
        edits = "edits of its recipe.yaml are ignored; " if is_recipe_edited(run) else ""
        raise OccupiedError(
            "this run is done",
            location=str(run.root),
            hint=f"{edits}to train longer: primerl-hpc resume {shlex.quote(run.root.name)} --set max_steps=N; to "
            f"change other settings, {fork_hint(run)}",
        )
    if is_recipe_edited(run):
        print(
            f"warning: {run.recipe} was edited: resume ignores the edits and continues with the submitted plan; "
            f"to change settings, {fork_hint(run)}",
            file=sys.stderr,
        )
    if chain.budget is not None:
        write_json(run.plan, plan.model_dump(mode="json"))
    register_run(run)
    if choose_code(run, plan, code):
        _write_scripts(run, plan, load_profile(str(run.profile), environ={}))
    renew_scripts(run, plan)
    return queue_run(run, plan, chain)


def _has_steps_left(run: RunDir, plan: Plan) -> bool:
    max_steps = plan.phase(MAIN_PHASE).recipe.max_steps
    return max_steps is not None and max_steps > (run.latest_checkpoint() or 0)


def renew_scripts(run: RunDir, plan: Plan) -> None:
    """Render the run's scripts again if one starts a module that this version has no longer; print a warning.

    Other scripts stay as they are: their user may have edited them.
    """
    scripts = [path for path in (job_script(run), engines_script(run)) if path.is_file()]
    if has_copy(run):
        return  # it has the modules of the version that rendered them
    modules = [name for path in scripts for name in re.findall(r"-m (primerl_hpc[\w.]*)", path.read_text())]
    if missing := [name for name in modules if not _is_module(name)]:
        print(
            f"warning: the scripts of this run are written again: {missing[0]} was renamed", file=sys.stderr
        )
        _write_scripts(run, plan, load_profile(str(run.profile), environ={}))


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _write_scripts(run: RunDir, plan: Plan, profile: LoadedProfile) -> None:
    """Render the scripts of the run. Raises ConfigError if its copy of the code lacks a module that they start."""
    root = code_root(run)
    scripts = make_scripts(plan, profile, root)
    modules = [name for text in scripts.values() for name in re.findall(r"-m (primerl_hpc[\w.]*)", text)]
    missing = [name for name in modules if root and has_copy(run) and not has_module(Path(root), name)]
    if missing:
        raise ConfigError(
            f"the run's copy of the code has no module {missing[0]}, which this version of primerl-hpc starts",
            location=root or "",
            hint="continue with the present code: primerl-hpc resume RUN --new-code",
        )
    for name, text in scripts.items():
        write_text(run.launch / name, text, mode=0o755)


def _check_own(run: RunDir) -> None:
    """Raise OccupiedError for another user's run, and for a run that another user could have changed."""
    hint = "only its owner can resume it; to continue from its checkpoint, set checkpoint.fork in your own recipe"
    check_may_change(run, hint=hint)
    check_own(run)


def fork_hint(run: RunDir) -> str:
    root = shlex.quote(str(run.root))
    return f"submit a new run from a checkpoint of this one: primerl-hpc submit RECIPE --set checkpoint.fork.run={root}"


def change_job(run: RunDir, changes: Sequence[str]) -> None:
    """Render the scripts again with changes in the profile's ``scheduler`` block (``scheduler.time=60``).

    The plan is kept, except for the margin before the walltime.

    Raises ConfigError for a change of any other key, OccupiedError while the run is running.
    """
    _check_own(run)
    plan = load_plan(run)
    check_not_running(run)
    profile = _changed_profile(run, changes)
    margin_s = profile.profile.scheduler.signal_margin_s
    if plan.signal_margin_s not in (None, margin_s):
        plan = plan.model_copy(update={"signal_margin_s": margin_s})
        write_json(run.plan, plan.model_dump(mode="json"))
    _write_scripts(run, plan, profile)
    write_text(run.profile, profile.text)


def _changed_profile(run: RunDir, changes: Sequence[str]) -> LoadedProfile:
    check_job_changes(changes)
    profile = load_profile(str(run.profile), overrides=changes, environ={})
    earlier = load_profile(str(run.profile), environ={})
    if srun_args(profile.profile.scheduler) != srun_args(earlier.profile.scheduler):
        raise ConfigError(
            f"{', '.join(changes)} changes the arguments of srun, which the plan contains",
            hint="submit a new run",
        )
    return profile


def check_job_changes(changes: Sequence[str]) -> None:
    """Raise ConfigError for a key of the profile that is part of the plan."""
    for text in changes:
        key = text.partition("=")[0].strip()
        if not key.startswith("scheduler.") or key in _PLAN_SETTINGS:
            raise ConfigError(
                f"{key} cannot change between attempts: the plan depends on it",
                hint="change only what sbatch requests (scheduler.time, scheduler.partition, …), or submit a new run",
            )


def check_not_running(run: RunDir) -> None:
    """Raise OccupiedError if the run is running or queued; UnansweredError if SLURM does not answer."""
    owner = read_json_or_none(run.supervisor_lock)
    if is_owner_alive(owner, run.supervisor_lock) and not is_owner_over(owner):
        raise OccupiedError(
            "this run is running",
            location=str(run.root),
            hint=f"primerl-hpc status {shlex.quote(str(run.root))}",
        )
    job, state = read_json_or_none(run.job) or {}, read_json_or_none(run.state) or {}
    jobs = JobWatcher()
    facts = jobs.facts_of([run])
    if jobs.trouble is not None:
        raise UnansweredError(
            f"cannot tell whether this run already has a queued job: {jobs.trouble}",
            location=str(run.root),
            hint="try again when SLURM responds",
        )
    written = state.get("state")
    has_ended = is_from_latest_job(state, job) and written in set(RunState) and RunState(written).is_final
    has_ended = has_ended or "here" in job  # the allocation remains after the run
    for link in jobs_of(job):
        if (activity := _activity(facts.get(link), has_ended=has_ended)) is not None:
            raise OccupiedError(
                f"job {link} of this run {activity}",
                location=str(run.root),
                hint=f"to start it again, cancel that job first: primerl-hpc cancel {shlex.quote(run.root.name)}",
            )


def _activity(fact: JobFact | None, *, has_ended: bool) -> str | None:
    """Return what an active job of the run does, None if it is not active.

    ``has_ended``: the run's supervisor recorded its end, so a running job is about to end too.
    """
    if fact is not None and fact.is_waiting:
        return "waits in the queue"
    if fact is not None and fact.state == "SUSPENDED":
        return "is suspended"
    return "is running" if fact is not None and fact.state == "RUNNING" and not has_ended else None


def queue_run(run: RunDir, plan: Plan, chain: ChainRequest = ONE_JOB) -> Submitted:
    """Submit the next attempt of a run directory that is frozen and not in use."""
    submitted = _queue(run, plan, chain)
    if plan.scheduler == "slurm" and not chain.is_here and (excess := excess_of(job_script(run))) is not None:
        notice(f"warning: {excess}. SLURM accepted the job, but starts it only if its QOS lifts the limit")
    return submitted


def _queue(run: RunDir, plan: Plan, chain: ChainRequest) -> Submitted:
    # written before the job can start: the attempt's number distinguishes its state from an earlier one's
    attempt = int((read_json_or_none(run.state) or {}).get("attempt", 0)) + 1
    facts = {"attempt": attempt, "submitted": round(time.time(), 3), "earlier": _earlier_jobs(run)}
    facts |= {} if chain.is_here or plan.scheduler == "local" else {"name": plan.name}
    if plan.ask_every_s > DEFAULT_ASK_EVERY_S:
        facts["ask_every_s"] = plan.ask_every_s  # views must observe it too
    run.stop_request.unlink(missing_ok=True)  # a request of an earlier attempt
    if chain.is_here:
        job = start_here(run, job_script(run), plan.num_hosts)
        write_json(run.job, {**job, **facts})
        return Submitted(run, plan, job["job_id"])
    if plan.scheduler == "local":
        job = submit_script(run, local_script(run, plan), plan.scheduler)
        write_json(run.job, {**job, **facts, "after": note_local_after(run, plan, job)})
        return Submitted(run, plan, job["job_id"])
    if not chain.is_chain and after_of(plan) == After() and not plan.num_elastic:
        job = submit_script(run, job_script(run), plan.scheduler)
        write_json(run.job, {**job, **facts})
        return Submitted(run, plan, job["job_id"])
    earlier = read_json_or_none(run.job) or {}
    if engines := earlier.get("engines_job_id"):
        with contextlib.suppress(SchedulerError):  # one of them may still be queued
            drop_jobs(still_queued(earlier, [engines]))
    # of a failed attempt, if SLURM has not removed them
    drop_jobs(still_queued(earlier, [after["job_id"] for after in earlier.get("after", {}).values()]))
    with together() as jobs:
        links = jobs.submit_links(run, job_script(run), chain.links)
        facts["after"] = queue_after(run, plan, jobs, links)
        if chain.is_chain:
            facts |= {"links": links, "until_done": chain.is_until_done}
        job = {"scheduler": plan.scheduler, "job_id": links[0], **facts}
        write_json(run.job, job)
        # after the attempt was written: engines would mistake the end of an earlier attempt for that of this one
        if plan.num_elastic:
            write_json(run.job, {**job, "engines_job_id": jobs.submit(run, engines_script(run))})
    return Submitted(run, plan, links[0], tuple(links))


def still_queued(job: Mapping[str, Any], numbers: Sequence[str]) -> list[str]:
    """Return those of a run's jobs that may be in the queue. SLURM may have given their numbers to later jobs.

    ``job``: content of control/job.json. Raises SchedulerError.
    """
    facts = find_facts(numbers) if numbers else {}
    return [
        number
        for number in numbers
        if (fact := facts.get(number)) is None
        or not (fact.is_over or is_reused(job, fact.name, fact.submitted))
    ]


def _earlier_jobs(run: RunDir) -> list[str]:
    job = read_json_or_none(run.job) or {}
    return [*job.get("earlier", ()), *jobs_of(job)]
