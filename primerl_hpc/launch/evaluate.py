"""Evaluations as runs of kind eval: of a recipe's model, of a run's policy versions, or of a model served elsewhere.

    loaded = load_evaluation(find_source("my-run"), EvalRequest(steps=(10, 20)), overrides=[])
    submit_evaluation(loaded, profile, run_dir)        # None: all scores exist already

In a directory that holds an evaluation, only missing scores are computed; model and tasks must be the same.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from primerl_hpc.cluster.load import LoadedProfile, change_profile
from primerl_hpc.cluster.scheduler_schema import Scheduler
from primerl_hpc.common.document import Document
from primerl_hpc.common.errors import ConfigError, NotFoundError, OccupiedError
from primerl_hpc.common.names import MAIN_PHASE, Kind
from primerl_hpc.launch.checklist import check, check_run
from primerl_hpc.launch.compose import Submission, compose
from primerl_hpc.launch.submit import (
    Submitted,
    check_not_running,
    prepare_run,
    queue_run,
    submit_run,
    write_files,
)
from primerl_hpc.plan.plan import Plan, load_plan
from primerl_hpc.recipe.load import (
    LoadedRecipe,
    load_recipe,
    resolve_recipe_path,
    validate_recipe,
    with_overrides,
)
from primerl_hpc.recipe.schema.evaluation import EvaluationSettings
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.rollout import EvalEnvironment, check_labels
from primerl_hpc.run.registry import find_run, register_run
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.scores import read_scores
from primerl_hpc.run.step_dirs import STABLE


@dataclass(frozen=True)
class EvalRequest:
    """Command-line settings that override the recipe or run; None and () keep its settings."""

    environments: tuple[str, ...] = ()
    """Labels of the recipe's environments, or ids of others."""
    samples: int | None = None
    num_tasks: int | None = None
    model: str | None = None
    base_url: str | None = None
    key_variable: str | None = None
    weights: Path | None = None
    steps: Literal["all"] | tuple[int, ...] | None = None
    every: int | None = None
    base: bool | None = None
    watch: bool | None = None
    replicas: int | None = None


def find_source(word: str) -> RunDir | Path:
    """Return the run or recipe that the argument names. Raises NotFoundError if it is neither."""
    if not Path(word).is_dir():
        try:
            return resolve_recipe_path(word)
        except NotFoundError as no_recipe:
            try:
                return find_run(word)
            except NotFoundError:
                raise NotFoundError(
                    f"'{word}' is neither a recipe nor a run",
                    hint=no_recipe.hint or "primerl-hpc status --list",
                ) from None
    return find_run(word)


def load_evaluation(source: RunDir | Path, request: EvalRequest, overrides: Sequence[str]) -> LoadedRecipe:
    """Return the eval recipe; ``overrides`` are keys of it. Raises ConfigError, NotFoundError."""
    base, model_path, weights = _read(source)
    recipe = base.recipe
    # kind sft uses the block for evaluation while training
    own_settings = recipe.evaluation if recipe.kind == Kind.EVAL else None
    settings = EvaluationSettings() if own_settings is None else own_settings
    evaluation = _settings(settings, request, weights)
    derived = recipe.for_evaluation(
        EvaluationSettings(),
        model_path=request.model or model_path,
        environments=_environments(recipe, request),
        replicas=request.replicas,
    )
    if request.model is not None:  # another model has its own tokenizer
        derived = derived.model_copy(
            update={"model": derived.model.model_copy(update={"tokenizer": recipe.model.tokenizer})}
        )
    if "weights" not in evaluation:
        derived = derived.model_copy(update={"lora": None})
    if recipe.kind == Kind.EVAL:
        derived = derived.model_copy(update={"name": recipe.name, "tracking": recipe.tracking})
    values = {**derived.model_dump(mode="json", exclude_defaults=True), "evaluation": evaluation}
    document = with_overrides(Document(values, {"evaluation": "the command line"}), overrides)
    loaded = LoadedRecipe(validate_recipe(document), document, base.path, base.warnings)
    if loaded.recipe.evaluation is not None and loaded.recipe.evaluation.external is not None:
        loaded.recipe.evaluation.external.key()
    return loaded


def _read(source: RunDir | Path) -> tuple[LoadedRecipe, str, Path | None]:
    """Return (recipe, model of version 0, folder of later versions)."""
    if isinstance(source, Path):
        loaded = load_recipe(str(source))
        return loaded, loaded.recipe.model.name, None
    plan = load_plan(source)
    if plan.kind == Kind.EVAL:
        raise ConfigError(
            "this run is an evaluation itself and cannot be evaluated",
            location=str(source.root),
            hint=f"show it with: primerl-hpc scores {shlex.quote(source.root.name)}; continue it with: resume",
        )
    phase = plan.phase(MAIN_PHASE)
    weights = source.weights if plan.kind in (Kind.RL, Kind.SFT) else None
    return LoadedRecipe(phase.recipe, Document(), source.recipe), phase.model_path, weights


def _settings(settings: EvaluationSettings, request: EvalRequest, weights: Path | None) -> dict[str, Any]:
    """Return the ``evaluation`` block as YAML values, which `validate_recipe` then checks like a user's."""
    values = settings.model_dump(mode="json", exclude_defaults=True)
    folder = request.weights or (weights if request.base_url is None and request.model is None else None)
    requested: dict[str, Any] = {
        "weights": str(folder) if folder else None,
        "steps": request.steps if request.steps in (None, "all") else list(request.steps or ()),
        "every": request.every,
        "base": request.base,
        "watch": request.watch,
    }
    values |= {name: value for name, value in requested.items() if value is not None}
    if request.base_url is not None:
        if request.model is None:
            raise ConfigError("--base-url needs --model: the model's name on that server")
        values["external"] = {"base_url": request.base_url}
    if request.key_variable is not None:
        if "external" not in values:
            raise ConfigError("--key-variable is only for --base-url, which is missing")
        values["external"]["key_variable"] = request.key_variable
    return values


def _environments(recipe: Recipe, request: EvalRequest) -> tuple[EvalEnvironment, ...]:
    known = {environment.label: environment for environment in recipe.environments.eval}
    chosen = [known.get(name) or EvalEnvironment(id=name) for name in dict.fromkeys(request.environments)]
    try:
        check_labels(chosen)
    except ValueError as error:
        raise ConfigError(
            f"--env: {error}", hint="environments with custom names have to be defined in a recipe"
        ) from None
    changes = {
        name: value
        for name, value in (("samples", request.samples), ("num_tasks", request.num_tasks))
        if value is not None
    }
    return tuple(environment.model_copy(update=changes) for environment in chosen or known.values())


_NODE_SETTINGS: dict[str, Any] = {
    name: Scheduler.model_fields[name].default
    for name in ("memory_per_cpu", "memory_per_gpu", "gres", "reservation", "nodelist", "switches", "hint")
}
"""Defaults of profile keys that describe the nodes of the profile's partition, and apply to no other one."""


def without_gpus(profile: LoadedProfile, changed: Sequence[str] = ()) -> LoadedProfile:
    """Return the profile for a job without engines: no GPUs, and the site's CPU partition if the profile has one.

    ``changed``: settings that the user changed in the profile, as ``key=value``; they are kept.
    """
    scheduler, cpu_partition = profile.profile.scheduler, profile.profile.cpu_partition
    other_gres = tuple(resource for resource in scheduler.gres if not resource.startswith("gpu"))
    if not profile.profile.node.gpus and other_gres == scheduler.gres:
        return profile
    changes: dict[str, Any] = {"node": {"gpus": 0}}
    wanted: dict[str, Any] = {"gres": other_gres, "memory_per_gpu": None}
    if cpu_partition is not None:
        own = cpu_partition.model_dump(exclude={"cores"})
        inherited = [name for name in ("account", "qos") if own[name] is None]
        wanted = {name: value for name, value in {**_NODE_SETTINGS, **own}.items() if name not in inherited}
        changes["node"]["cores"] = cpu_partition.cores
    kept = {text.partition("=")[0].strip().removeprefix("scheduler.") for text in changed}
    changes["scheduler"] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in wanted.items()
        if name not in kept and value != getattr(scheduler, name)
    }
    return change_profile(profile, changes, "evaluation.external")


def default_run_dir(run: RunDir, request: EvalRequest) -> tuple[EvalRequest, RunDir]:
    """Return what is evaluated and where by default: ``<run>-evaluation``, even if that has some scores already.

    A finished evaluation is kept: environments that it does not have go to ``<run>-evaluation-<names>``, so that their
    failure does not change the state of the finished one.
    """
    folder = run.evaluation
    if not request.environments or not folder.plan.is_file():
        return request, folder
    plan = load_plan(folder)
    if plan.kind != Kind.EVAL or not is_complete(folder, plan):
        return request, folder
    evaluated = plan.phase(MAIN_PHASE).recipe.environments.eval
    known = {name for environment in evaluated for name in (environment.label, environment.id)}
    others = tuple(name for name in dict.fromkeys(request.environments) if name not in known)
    if not others:
        return request, folder
    names = "-".join(re.sub(r"[^\w.-]+", "-", name) for name in others)
    root = folder.root.with_name(f"{folder.root.name}-{names}")
    return replace(request, environments=others), RunDir(root)


# -- in a new directory, or in that of an earlier evaluation ---------------------------------------


def submit_evaluation(
    loaded: LoadedRecipe, profile: LoadedProfile, run_dir: Path | None, *, is_live: bool = False
) -> Submitted | None:
    """Submit the evaluation; None if ``run_dir`` has all scores. Raises OccupiedError if it holds something else."""
    if (run := _earlier(run_dir)) is None:
        return submit_run(loaded, profile, run_dir, is_live=is_live)
    submission = _check_again(run, loaded, profile, is_live=is_live)
    if is_complete(run, submission.plan):
        return None
    _freeze_again(run, submission)
    return queue_run(run, submission.plan)


def check_evaluation(loaded: LoadedRecipe, profile: LoadedProfile, run_dir: Path | None) -> Plan:
    """Return the plan that `submit_evaluation` would submit. Nothing is written."""
    run = _earlier(run_dir)
    checked = check_run(loaded, profile, root=run_dir) if run is None else _check_again(run, loaded, profile)
    return checked.plan


def prepare_evaluation(
    loaded: LoadedRecipe, profile: LoadedProfile, run_dir: Path | None, *, is_live: bool = False
) -> tuple[RunDir, Plan]:
    """Like `submit_evaluation`, but without submitting a job."""
    if (run := _earlier(run_dir)) is None:
        return prepare_run(loaded, profile, run_dir, is_live=is_live)
    submission = _check_again(run, loaded, profile, is_live=is_live)
    _freeze_again(run, submission)
    return run, submission.plan


def _earlier(run_dir: Path | None) -> RunDir | None:
    run = RunDir(run_dir.expanduser().resolve()) if run_dir is not None else None
    return run if run is not None and run.plan.is_file() else None


def _check_again(
    run: RunDir, loaded: LoadedRecipe, profile: LoadedProfile, *, is_live: bool = False
) -> Submission:
    submission = compose(loaded, profile, run.root, is_live=is_live)
    check_same(run, load_plan(run), submission.plan)
    check_not_running(run)
    check(submission, only=("software", "environments"))
    return submission


def _freeze_again(run: RunDir, submission: Submission) -> None:
    write_files(submission.files, run)
    register_run(run)


def is_complete(run: RunDir, plan: Plan) -> bool:
    """True if all scores exist, and no live run is watched that may write further versions."""
    settings = plan.phase(MAIN_PHASE).recipe.evaluation or EvaluationSettings()
    return not settings.watch and not missing_scores(run, plan)


def missing_scores(run: RunDir, plan: Plan) -> list[tuple[int, str]]:
    """Return (version, environment) pairs without a score, of the versions that exist now."""
    recipe = plan.phase(MAIN_PHASE).recipe
    settings, scores = recipe.evaluation or EvaluationSettings(), read_scores(run)
    stable = run.list_steps(Path(settings.weights), STABLE) if settings.weights else []
    return [
        (version, environment.label)
        for version in settings.versions(stable)
        for environment in recipe.environments.eval
        if (version, environment.label) not in scores
    ]


def check_same(run: RunDir, earlier: Plan, plan: Plan) -> None:
    """Raise OccupiedError if scores of both evaluations are not comparable."""
    if earlier.kind != Kind.EVAL:
        raise OccupiedError(
            f"the directory holds a run of kind {earlier.kind.value}, not an evaluation",
            location=str(run.root),
            hint="choose another --run-dir",
        )
    before, after = earlier.phase(MAIN_PHASE).recipe, plan.phase(MAIN_PHASE).recipe
    old, new = _facts(before), _facts(after)
    labels = {environment.label for environment in before.environments.eval}
    labels &= {environment.label for environment in after.environments.eval}
    for label in labels:
        old[f"environment {label}"] = _tasks(before, label)
        new[f"environment {label}"] = _tasks(after, label)
    if different := [name for name in new if old[name] != new[name]]:
        name = different[0]
        raise OccupiedError(
            f"the directory holds scores of another {name}: {old[name]}, not {new[name]}",
            location=str(run.root),
            hint="choose another --run-dir",
        )


def _facts(recipe: Recipe) -> dict[str, Any]:
    """Return what scores depend on, in addition to the environments."""
    settings = recipe.evaluation or EvaluationSettings()
    return {
        "model": recipe.model.name,
        "weights folder": settings.weights,
        "server": settings.external and settings.external.base_url,
        "renderer": recipe.model.renderer.model_dump(),
        "context length": recipe.max_model_len,
        "sampling": recipe.rollouts.sampling.model_dump(),
    }


def _tasks(recipe: Recipe, label: str) -> dict[str, Any]:
    environment = next(item for item in recipe.environments.eval if item.label == label)
    names = {"id", "args", "env_args", "samples", "num_tasks", "sampling"}
    return environment.model_dump(include=names, exclude_defaults=True)
