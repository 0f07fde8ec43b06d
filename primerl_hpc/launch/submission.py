"""Compose the plan and the scripts of a run from a recipe and a profile, check them, and write them.

submission = compose(loaded, profile, root)     # nothing is written
check(submission, chain)                        # raises what would only fail after hours in the queue
write(submission, run)                          # into the claimed run directory; then `submit.queue_run`
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from primerl_hpc.cluster.load import LoadedProfile, change_profile
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common import env
from primerl_hpc.common.document import Document
from primerl_hpc.common.errors import ConfigError, NotFoundError, PrimerlError
from primerl_hpc.common.log import notice
from primerl_hpc.common.names import MAIN_PHASE
from primerl_hpc.launch.bundle.manifest import note_changes, plan_bundle
from primerl_hpc.launch.chain import ChainRequest, check_chain
from primerl_hpc.launch.checks.chat_template import renderer_warning
from primerl_hpc.launch.checks.environments import check_environments
from primerl_hpc.launch.checks.interpreters import Interpreters
from primerl_hpc.launch.checks.metric_keys import check_metric_keys
from primerl_hpc.launch.checks.software import check_software
from primerl_hpc.launch.checks.token_ids import check_token_ids
from primerl_hpc.launch.code.keep import RunCode, describe_code, keep_code, plan_code
from primerl_hpc.launch.doctor.site import check_site
from primerl_hpc.launch.export.export import check_target
from primerl_hpc.launch.follow_up import after_of
from primerl_hpc.launch.fork import import_checkpoint
from primerl_hpc.launch.planning.forecast import (
    MeasuredLengths,
    PlanForecast,
    decide_auto,
    forecast_plan,
    hub_variables,
    refuse_misfit,
)
from primerl_hpc.launch.planning.hour_budget import check_new_budget, hours_warning, with_budget
from primerl_hpc.launch.planning.model_config import check_positions, refuse_untrainable
from primerl_hpc.launch.prefetch.check import check_needs, check_packages, package_needs, prefetch_command
from primerl_hpc.launch.prefetch.packages import package_records
from primerl_hpc.launch.prepare import (
    check_path,
    claim_run_dir,
    clear_run_dir,
    freeze,
    interpreter,
    interpreter_here,
    link_parts,
    package_root,
    runs_folder,
)
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.plan.types import Plan
from primerl_hpc.recipe.custom_code import note_custom_code
from primerl_hpc.recipe.load import LoadedRecipe
from primerl_hpc.recipe.resolve import resolve
from primerl_hpc.recipe.schema.evaluation import EvaluationSettings
from primerl_hpc.render.bundle import UNPACK_SCRIPT, render_unpack
from primerl_hpc.render.job import render_engines, render_export, render_job
from primerl_hpc.render.lint import warnings_of
from primerl_hpc.run.access.ownership import check_parents
from primerl_hpc.run.registry import register_run
from primerl_hpc.run.rundir import RunDir

ONE_JOB = ChainRequest()


@dataclass(frozen=True)
class Submission:
    recipe: LoadedRecipe
    profile: LoadedProfile
    plan: Plan
    scripts: dict[str, str]
    """Batch scripts by file name: ``job.sbatch``, and where needed ``engines.sbatch`` and ``export.sbatch``."""
    follow_up: Submission | None = None
    """The evaluation that starts when the run is done (``after.evaluation``), a run of its own."""
    forecast: PlanForecast | None = None
    """The prediction; None for an evaluation that follows."""
    code: RunCode | None = None
    """The copy of the code that the run executes; None: it executes this installation or checkout."""


def compose(
    loaded: LoadedRecipe,
    profile: LoadedProfile,
    root: Path,
    missing: list[PrimerlError] | None = None,
    *,
    budget: str | None = None,
    is_live: bool = False,
) -> Submission:
    """Compile the plan and render the scripts of a run at ``root``. ``missing`` as in `forecast_for`.

    ``budget``: text of ``--budget``. ``is_live``: the run executes this installation or checkout, not a copy of it.
    Prints a warning for directives in a user's own templates that are rarely intended. Raises ConfigError.
    """
    plan, forecast = forecast_for(loaded, profile, root, missing)
    plan = with_budget(plan, budget)
    follow_up = _compose_evaluation(plan, profile, is_live)
    code = None if is_live else plan_code(RunDir(root), plan)
    scripts = make_scripts(plan, profile, root_of(code))
    return Submission(loaded, profile, plan, scripts, follow_up, forecast, code)


def root_of(code: RunCode | None) -> str | None:
    """Return what the scripts add to PYTHONPATH."""
    return package_root() if code is None else code.root


def forecast_for(
    loaded: LoadedRecipe,
    profile: LoadedProfile,
    root: Path,
    missing: list[PrimerlError] | None = None,
    measured: MeasuredLengths | None = None,
) -> tuple[Plan, PlanForecast]:
    """Return the plan of this recipe at ``root`` with its prediction, and the forecast behind it.

    ``missing``: collects the errors about missing files instead of raising the first one. ``measured``: lengths of
    rollouts with which ``auto`` is decided; None: those that the recipe expects.
    """
    check_metric_keys(loaded.recipe, loaded.document)
    recipe = resolve(loaded, missing=missing)
    check_positions(recipe, hub_variables(recipe, profile.profile))
    recipe, notes = decide_auto(recipe, profile.profile, measured)
    plan = compile_plan(recipe, profile.profile, run_dir=str(root), python=interpreter(profile))
    plan = with_bundle(plan, profile.profile)
    forecast = forecast_plan(plan, profile.profile, measured)
    changes = {"notes": (*notes, *plan.notes), "prediction": forecast.record()}
    return plan.model_copy(update=changes), forecast


def with_bundle(plan: Plan, profile: Profile) -> Plan:
    """Return the plan with the bundle of the profile, if it has one.

    Raises ConfigError, NotFoundError or DataError for a bundle that the run cannot use.
    """
    if profile.software.bundle is None:
        return plan
    if profile.scheduler.type == "local":
        raise ConfigError(
            f"profile '{profile.name}' is local and has software.bundle, which only jobs of SLURM unpack",
            location="software.bundle of the profile",
            hint="set software.default.python instead",
        )
    return plan.model_copy(update={"bundle": plan_bundle(Path(profile.software.bundle), profile)})


def preview(
    loaded: LoadedRecipe,
    profile: LoadedProfile,
    missing: list[PrimerlError] | None = None,
    measured: MeasuredLengths | None = None,
) -> tuple[Plan, PlanForecast]:
    """Return the plan for the default runs folder, and its forecast; arguments as in `forecast_for`.

    Raises ConfigError.
    """
    return forecast_for(loaded, profile, preview_root(loaded, profile), missing, measured)


def preview_root(loaded: LoadedRecipe, profile: LoadedProfile) -> Path:
    """Return the default run directory without its number. Raises ConfigError."""
    root = (runs_folder(profile.profile) / loaded.recipe.name).resolve()
    check_path(root)
    return root


def _compose_evaluation(plan: Plan, profile: LoadedProfile, is_live: bool) -> Submission | None:
    if (settings := after_of(plan).evaluation) is None:
        return None
    phase = plan.phase(MAIN_PHASE)
    recipe, run = phase.recipe, RunDir(Path(plan.run_dir))
    steps = (recipe.steps,) if settings.steps == "last" else settings.steps
    evaluation = recipe.for_evaluation(
        EvaluationSettings(weights=str(run.weights), steps=steps, base=settings.base),
        model_path=phase.model_path,
        environments=settings.environments,
        replicas=settings.replicas,
    )
    changed = change_profile(profile, settings.profile, "after.evaluation.profile")
    root = str(run.evaluation.root)
    own_plan = compile_plan(evaluation, changed.profile, run_dir=root, python=interpreter(changed))
    own_plan = with_bundle(own_plan, changed.profile)
    values = evaluation.model_dump(mode="json", exclude_defaults=True)
    loaded = LoadedRecipe(evaluation, Document(values), run.recipe)
    code = None if is_live else plan_code(RunDir(Path(root)), own_plan)
    return Submission(loaded, changed, own_plan, make_scripts(own_plan, changed, root_of(code)), code=code)


# -- scripts ---------------------------------------------------------------------------------------


def make_scripts(plan: Plan, profile: LoadedProfile, root: str | None) -> dict[str, str]:
    """Return all scripts of a run by file name: the run's, its elastic engines', its export's. Raises ConfigError.

    ``root``: folder of the code for PYTHONPATH; None if the package is installed in the interpreter.
    """
    scripts = {"job.sbatch": make_script(plan, profile, root)}
    if plan.bundle is not None:
        scratch = profile.profile.scratch_folder
        scripts[UNPACK_SCRIPT] = render_unpack(
            plan.bundle,
            owner=f"run {plan.name}",
            scratch=None if scratch is None else scratch.path,
            may_be_shared=plan.allow_shared_parent,
        )
    if plan.num_elastic:
        scripts["engines.sbatch"] = render_engines(
            plan, profile.profile, python=_python(plan, profile), package_root=root
        )
    if (export := after_of(plan).export) is not None:
        changed = change_profile(profile, export.profile, "after.export.profile")
        if changed.profile.software.bundle not in (None, profile.profile.software.bundle):
            raise ConfigError(
                "after.export.profile: the export uses the bundle of its run",
                hint="leave out software.bundle, or set software.default.python",
            )
        if changed.profile.software.bundle is None:
            plan = plan.model_copy(update={"bundle": None})
        scripts["export.sbatch"] = render_export(
            plan, changed.profile, python=_python(plan, changed), package_root=root
        )
    return scripts


def make_script(plan: Plan, profile: LoadedProfile, root: str | None) -> str:
    """Return job.sbatch; print warnings about a user's own template to stderr. Raises ConfigError."""
    script = render_job(plan, profile.profile, python=_python(plan, profile), package_root=root)
    for warning in warnings_of(script):
        notice(f"warning: {warning}")
    return script


def _python(plan: Plan, profile: LoadedProfile) -> str:
    """Return the interpreter that a script starts. Benchmarks and exports may run without the bundle."""
    return interpreter(profile) if plan.bundle is not None else interpreter_here(profile)


# -- checks ----------------------------------------------------------------------------------------


def check_run(
    loaded: LoadedRecipe,
    profile: LoadedProfile,
    chain: ChainRequest = ONE_JOB,
    run_dir: Path | None = None,
    missing: list[PrimerlError] | None = None,
    *,
    is_live: bool = False,
) -> Submission:
    """Compose and check a run without writing anything; ``run_dir`` None: in the default runs folder.

    ``missing``: collects the errors about missing models and files instead of raising them. ``is_live`` as in
    `compose`. Raises ConfigError, OccupiedError, NotFoundError, DataError.
    """
    root = preview_root(loaded, profile) if run_dir is None else run_dir
    submission = compose(loaded, profile, root, missing, budget=chain.budget, is_live=is_live)
    check(submission, chain, missing)
    return submission


def check(
    submission: Submission, chain: ChainRequest = ONE_JOB, missing: list[PrimerlError] | None = None
) -> None:
    """Check everything that can be checked before submission; print warnings about the rest to stderr.

    ``missing`` as in `check_run`. Raises ConfigError, OccupiedError, NotFoundError, DataError.
    """
    plan, profile, loaded = submission.plan, submission.profile, submission.recipe
    check_chain(chain, plan)
    check_parents(Path(plan.run_dir), is_allowed=plan.allow_shared_parent)
    if (export := after_of(plan).export) is not None:
        check_target(Path(export.to), option="after.export.to")
    check_keys(plan, profile)
    for warning in check_site(plan, profile.profile):
        notice(f"warning: {warning}")
    if plan.bundle is not None and (change := note_changes(Path(plan.bundle.path), Path(sys.prefix))):
        notice(f"warning: {change}")
    refuse_untrainable_model(plan, profile.profile)
    recipe = plan.phase(MAIN_PHASE).recipe
    check_token_ids(recipe, hub_variables(recipe, profile.profile))
    if submission.forecast is not None:
        check_forecast(submission.forecast)
    check_new_budget(plan)
    if warning := hours_warning(plan, submission.forecast):
        notice(f"warning: {warning}")
    check_software(plan, loaded.document)
    command = prefetch_command(loaded, profile)
    for warning in check_packages(plan, profile.profile, command):
        notice(f"warning: {warning}")
    with Interpreters() as interpreters:
        check_environments(plan, profile, loaded.document, interpreters)
        if warning := renderer_warning(recipe, profile, interpreters):
            notice(f"warning: {warning}")
    try:
        warnings = check_needs(plan, profile.profile, command)
    except NotFoundError as error:
        if missing is None:
            raise
        missing.append(error)
        warnings = []
    for warning in warnings:
        notice(f"warning: {warning}")
    note_custom_code(loaded.recipe)


def refuse_untrainable_model(plan: Plan, profile: Profile) -> None:
    """Raise ConfigError if the plan trains a model that this version cannot train, or does not know."""
    recipe = plan.phase(MAIN_PHASE).recipe
    refuse_untrainable(recipe, hub_variables(recipe, profile), plan.accelerator)


def check_forecast(forecast: PlanForecast) -> None:
    """Print rules of thumb that the recipe breaks to stderr. Raises ConfigError for a plan that does not fit."""
    for warning in forecast.warnings:
        notice(f"warning: {warning}")
    refuse_misfit(forecast)


def check_keys(plan: Plan, profile: LoadedProfile) -> None:
    """Raise ConfigError if an external server needs a key that is not set in the environment, which the job inherits.

    Setup lines of the profile may export the key on the node; then this cannot be checked.
    """
    if profile.profile.software.setup:
        return
    for phase in plan.phases:
        for process in (*phase.processes, *phase.elastic):
            for name, source in process.inherited_env.items():
                if env.variable(source) is None:
                    raise ConfigError(
                        f"{name} of {process.name} is read from the environment variable {source}, which is not set",
                        hint=f"export {source} before you submit",
                    )
        if (evaluation := phase.recipe.evaluation) is not None and evaluation.external is not None:
            evaluation.external.key()
        for model in (phase.recipe.teacher, phase.recipe.judge):
            if model is not None:
                model.key()


# -- writing ---------------------------------------------------------------------------------------


def write(submission: Submission, run: RunDir) -> None:
    """Write the run into its claimed directory, with a checkpoint it forks from and the run that follows it."""
    link_parts(run, submission.plan, submission.profile.profile)
    import_checkpoint(run, submission.plan.phases[-1].recipe)
    write_frozen(submission, run)
    if (evaluation := submission.follow_up) is not None:
        folder = claim_run_dir(run.evaluation.root, evaluation.profile)
        try:
            write_frozen(evaluation, folder)
        except BaseException:
            clear_run_dir(folder.root, keep_root=False)
            raise
        register_run(folder)


def write_frozen(submission: Submission, run: RunDir) -> None:
    """Write code, recipe, profile, plan and scripts of one run."""
    code = submission.code
    if code is not None:
        keep_code(run, code)
    facts = describe_code(run, code)
    if packages := package_records(package_needs(submission.plan, submission.profile.profile)):
        facts["environment_packages"] = packages
    freeze(run, submission.recipe, submission.profile, submission.plan, submission.scripts, facts)
