"""Compose a run from a recipe and a profile: its plan, forecast, scripts and copy of the code, as one value.

    submission = compose(loaded, profile, root)     # nothing is written or printed
    check(submission)                               # `checklist`: what would only fail after hours in the queue
    prepare_run(loaded, profile, root)              # `submit`: composes, checks and writes the run directory

The recipe's model, its forecast and its plan are read and computed here, once for each submission.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from primerl_hpc.checks.recipe.metric_keys import check_metric_keys
from primerl_hpc.checks.recipe.model_config import ModelConfig, check_positions, read_model
from primerl_hpc.cluster.load import LoadedProfile, change_profile
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.document import Document
from primerl_hpc.common.errors import ConfigError, PrimerlError
from primerl_hpc.common.names import MAIN_PHASE
from primerl_hpc.common.package import package_root
from primerl_hpc.common.safety.odd_text import check_path_text, shown
from primerl_hpc.launch.planning.forecast import MeasuredLengths, PlanForecast, decide_auto, forecast_plan
from primerl_hpc.launch.planning.hour_budget import with_budget
from primerl_hpc.offline.bundle.manifest import plan_bundle
from primerl_hpc.offline.code.keep import RunCode, plan_code
from primerl_hpc.offline.prefetch.needs import Need, needs_of_plan
from primerl_hpc.plan.plan import BUNDLE_PYTHON, Plan
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import LoadedRecipe
from primerl_hpc.recipe.resolve import resolve
from primerl_hpc.recipe.schema.evaluation import EvaluationSettings
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.render.bundle import UNPACK_SCRIPT, render_unpack
from primerl_hpc.render.job import (
    EXPORT_SETUP_SCRIPT,
    SETUP_SCRIPT,
    render_engines,
    render_export,
    render_job,
    render_setup,
)
from primerl_hpc.render.lint import warnings_of
from primerl_hpc.run.rundir import RunDir


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


ONE_JOB = ChainRequest()


@dataclass(frozen=True)
class PlannedRun:
    """A recipe on a profile: what would run where, and how long it would take."""

    recipe: LoadedRecipe
    profile: LoadedProfile
    plan: Plan
    model: ModelConfig
    forecast: PlanForecast
    needs: list[Need]
    """Models, data, packages and images that it loads."""


@dataclass(frozen=True)
class RunFiles:
    """The content of a run directory before its first attempt."""

    recipe: LoadedRecipe
    profile: LoadedProfile
    plan: Plan
    scripts: dict[str, str]
    """Batch scripts by file name: ``job.sbatch``, and where needed ``engines.sbatch`` and ``export.sbatch``."""
    code: RunCode | None
    """The copy of the code that the run executes; None: it executes this installation or checkout."""
    needs: list[Need]


@dataclass(frozen=True)
class Submission(PlannedRun):
    files: RunFiles
    follow_up: RunFiles | None
    """The evaluation that starts when the run is done (``after.evaluation``), a run of its own."""

    @property
    def warnings(self) -> list[str]:
        """Directives in a user's own templates that are rarely intended."""
        runs = [files for files in (self.follow_up, self.files) if files is not None]
        return [warning for files in runs for warning in warnings_of(files.scripts["job.sbatch"])]


def compose(
    loaded: LoadedRecipe,
    profile: LoadedProfile,
    root: Path | None = None,
    missing: list[PrimerlError] | None = None,
    *,
    budget: str | None = None,
    is_live: bool = False,
) -> Submission:
    """Compile the plan and render the scripts of a run. ``root`` and ``missing`` as in `plan_run`.

    ``budget``: text of ``--budget``. ``is_live``: the run executes this installation or checkout, not a copy of it.
    Raises ConfigError.
    """
    planned = plan_run(loaded, profile, root, missing)
    plan = with_budget(planned.plan, budget)
    follow_up = _compose_evaluation(plan, profile, is_live)
    files = _compose_files(loaded, profile, plan, planned.needs, is_live=is_live)
    shared = (planned.model, planned.forecast, planned.needs)
    return Submission(loaded, profile, plan, *shared, files, follow_up)


def plan_run(
    loaded: LoadedRecipe,
    profile: LoadedProfile,
    root: Path | None = None,
    missing: list[PrimerlError] | None = None,
    measured: MeasuredLengths | None = None,
) -> PlannedRun:
    """Plan this recipe at ``root`` and predict it. ``root`` None: in the default runs folder, without a number.

    ``missing``: collects the errors about missing files instead of raising the first one. ``measured``: lengths of
    rollouts with which ``auto`` is decided; None: those that the recipe expects. Raises ConfigError.
    """
    if root is None:
        root = (profile.profile.runs_folder() / loaded.recipe.name).resolve()
        check_path(root)
    check_metric_keys(loaded.recipe, loaded.document)
    recipe = resolve(loaded, missing=missing)
    model = read_model(recipe, profile.profile)
    check_positions(recipe, model)
    recipe, notes = decide_auto(recipe, profile.profile, model, measured)
    plan = _compile(recipe, profile, root)
    forecast = forecast_plan(plan, profile.profile, model, measured)
    changes = {"notes": (*notes, *plan.notes), "prediction": forecast.record()}
    needs = needs_of_plan(plan, profile.profile)
    return PlannedRun(loaded, profile, plan.model_copy(update=changes), model, forecast, needs)


def check_path(path: Path) -> None:
    """Raise ConfigError for a run directory that SLURM, JSON or a command line would take for another one."""
    check_path_text(path, "run directory")
    reason = ""
    if "%" in str(path):
        reason = "contains %, which SLURM replaces in names of files"
    elif path.name.startswith("-"):
        reason = "has a name that commands take for an option"
    if reason:
        raise ConfigError(
            f"run directory: the path {shown(str(path))} {reason}", hint="rename it, or use another path"
        )


def _compile(recipe: Recipe, profile: LoadedProfile, root: Path) -> Plan:
    plan = compile_plan(recipe, profile.profile, run_dir=str(root), python=interpreter(profile))
    return with_bundle(plan, profile.profile)


def interpreter(profile: LoadedProfile) -> str:
    """Return the interpreter of the supervisor, and of roles outside of containers without one of their own."""
    software = profile.profile.software
    return BUNDLE_PYTHON if software.bundle is not None else software.python_here


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


def _compose_evaluation(plan: Plan, profile: LoadedProfile, is_live: bool) -> RunFiles | None:
    if (settings := plan.after.evaluation) is None:
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
    own_plan = _compile(evaluation, changed, run.evaluation.root)
    values = evaluation.model_dump(mode="json", exclude_defaults=True)
    loaded = LoadedRecipe(evaluation, Document(values), run.recipe)
    needs = needs_of_plan(own_plan, changed.profile)
    return _compose_files(loaded, changed, own_plan, needs, is_live=is_live)


def _compose_files(
    loaded: LoadedRecipe, profile: LoadedProfile, plan: Plan, needs: list[Need], *, is_live: bool
) -> RunFiles:
    code = None if is_live else plan_code(RunDir(Path(plan.run_dir)), plan)
    scripts = make_scripts(plan, profile, package_root() if code is None else code.root)
    return RunFiles(loaded, profile, plan, scripts, code, needs)


# -- scripts ---------------------------------------------------------------------------------------


def make_scripts(plan: Plan, profile: LoadedProfile, root: str | None) -> dict[str, str]:
    """Return all scripts of a run by file name: the run's, its elastic engines', its export's. Raises ConfigError.

    ``root``: folder of the code for PYTHONPATH; None if the package is installed in the interpreter.
    """
    scripts = {"job.sbatch": make_script(plan, profile, root)}
    if profile.profile.software.has_setup:
        scripts[SETUP_SCRIPT] = render_setup(profile.profile)
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
            plan, profile.profile, python=profile.profile.software.python_here, package_root=root
        )
    if (export := plan.after.export) is not None:
        changed = change_profile(profile, export.profile, "after.export.profile")
        if changed.profile.software.bundle not in (None, profile.profile.software.bundle):
            raise ConfigError(
                "after.export.profile: the export uses the bundle of its run",
                hint="leave out software.bundle, or set software.default.python",
            )
        if changed.profile.software.bundle is None:
            plan = plan.model_copy(update={"bundle": None})
        if changed.profile.software.has_setup:
            scripts[EXPORT_SETUP_SCRIPT] = render_setup(changed.profile)
        scripts["export.sbatch"] = render_export(
            plan, changed.profile, python=changed.profile.software.python_here, package_root=root
        )
    return scripts


def make_script(plan: Plan, profile: LoadedProfile, root: str | None) -> str:
    """Return job.sbatch; see `render.lint.warnings_of` for a user's own template. Raises ConfigError."""
    return render_job(plan, profile.profile, python=profile.profile.software.python_here, package_root=root)
