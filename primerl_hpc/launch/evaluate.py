"""Evaluations as runs of kind eval: of a recipe's model, of the policy versions of a run, of a model served elsewhere.

    loaded = load_evaluation(find_source("my-run"), EvalRequest(steps=(10, 20)), overrides=[])
    submit_evaluation(loaded, profile, run_dir)        # None: all scores are there already

In a directory that holds an evaluation only what is missing is run; it must be of the same model and tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from primerl_hpc.cluster.load import LoadedProfile, change_profile
from primerl_hpc.cluster.schema import Scheduler
from primerl_hpc.common.errors import ConfigError, NotFoundError, OccupiedError
from primerl_hpc.common.names import MAIN_PHASE, Kind
from primerl_hpc.common.registry import find_run, register_run
from primerl_hpc.common.rundir import STABLE, RunDir
from primerl_hpc.common.scores import read_scores
from primerl_hpc.common.validate import validate
from primerl_hpc.common.yamldoc import Document
from primerl_hpc.launch.prepare import compile_for, freeze, make_script
from primerl_hpc.launch.submit import (
    Submitted,
    check_not_running,
    check_run,
    prepare_run,
    queue_run,
    submit_run,
)
from primerl_hpc.plan.types import Plan, load_plan
from primerl_hpc.recipe.evaluation_schema import Evaluation
from primerl_hpc.recipe.load import LoadedRecipe, load_recipe, resolve_recipe_path, with_overrides
from primerl_hpc.recipe.rollout_schema import EvalEnvironment, check_labels
from primerl_hpc.recipe.schema import Recipe


@dataclass(frozen=True)
class EvalRequest:
    """What the command line says on top of recipe or run; None and () leave what is there."""

    environments: tuple[str, ...] = ()
    """Labels of the recipe's, or ids of others."""
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
    """The run, or else the recipe, that a user means. Raises NotFoundError when it is neither."""
    if not Path(word).is_dir():
        try:
            return resolve_recipe_path(word)
        except NotFoundError as no_recipe:
            try:
                return find_run(word)
            except NotFoundError:
                raise NotFoundError(
                    f"'{word}' is neither a recipe nor a run", mend=no_recipe.mend or "primerl-hpc list"
                ) from None
    return find_run(word)


def load_evaluation(source: RunDir | Path, request: EvalRequest, overrides: Sequence[str]) -> LoadedRecipe:
    """The eval recipe that is meant; ``overrides`` are keys of it. Raises ConfigError, NotFoundError."""
    recipe, model_path, weights, path = _read(source)
    settings = recipe.evaluation or Evaluation()
    evaluation = _settings(settings, request, weights)
    made = recipe.for_evaluation(
        Evaluation(),
        model_path=request.model or model_path,
        environments=_environments(recipe, request),
        replicas=request.replicas,
    )
    if request.model is not None:  # another model has its own tokenizer
        made = made.model_copy(
            update={"model": made.model.model_copy(update={"tokenizer": recipe.model.tokenizer})}
        )
    if "weights" not in evaluation:
        made = made.model_copy(update={"lora": None})
    if recipe.kind == Kind.EVAL:
        made = made.model_copy(update={"name": recipe.name, "tracking": recipe.tracking})
    values = {**made.model_dump(mode="json", exclude_defaults=True), "evaluation": evaluation}
    document = with_overrides(Document(values, {"evaluation": "the command line"}), overrides)
    loaded = LoadedRecipe(validate(Recipe, document), document, path)
    if loaded.recipe.evaluation is not None and loaded.recipe.evaluation.external is not None:
        loaded.recipe.evaluation.external.key()
    return loaded


def _read(source: RunDir | Path) -> tuple[Recipe, str, Path | None, Path]:
    """(recipe, version 0, folder of later versions, file)"""
    if isinstance(source, Path):
        recipe = load_recipe(str(source)).recipe
        return recipe, recipe.model.name, None, source
    plan = load_plan(source)
    if plan.kind == Kind.EVAL:
        raise ConfigError(
            "this run is an evaluation itself",
            place=str(source.root),
            mend=f"primerl-hpc scores {source.root.name} shows it, resume goes on with it",
        )
    phase = plan.phase(MAIN_PHASE)
    weights = source.weights if plan.kind in (Kind.RL, Kind.SFT) else None
    return phase.recipe, phase.model_path, weights, source.recipe


def _settings(settings: Evaluation, request: EvalRequest, weights: Path | None) -> dict[str, Any]:
    """The ``evaluation`` block as YAML would have it; `validate` looks at it like at a user's."""
    values = settings.model_dump(mode="json", exclude_defaults=True)
    folder = request.weights or (weights if request.base_url is None and request.model is None else None)
    said: dict[str, Any] = {
        "weights": str(folder) if folder else None,
        "steps": request.steps if request.steps in (None, "all") else list(request.steps or ()),
        "every": request.every,
        "base": request.base,
        "watch": request.watch,
    }
    values |= {name: value for name, value in said.items() if value is not None}
    if request.base_url is not None:
        if request.model is None:
            raise ConfigError("--base-url needs --model: what the server is asked for")
        values["external"] = {"base_url": request.base_url}
    if request.key_variable is not None:
        if "external" not in values:
            raise ConfigError("--key-variable names the key of --base-url, which is missing")
        values["external"]["key_variable"] = request.key_variable
    return values


def _environments(recipe: Recipe, request: EvalRequest) -> tuple[EvalEnvironment, ...]:
    known = {environment.label: environment for environment in recipe.environments.eval}
    chosen = [known.get(name) or EvalEnvironment(id=name) for name in dict.fromkeys(request.environments)]
    try:
        check_labels(chosen)
    except ValueError as error:
        raise ConfigError(
            f"--env: {error}", mend="environments with names of their own stand in a recipe"
        ) from None
    changes = {
        name: value
        for name, value in (("samples", request.samples), ("num_tasks", request.num_tasks))
        if value is not None
    }
    return tuple(each.model_copy(update=changes) for each in chosen or known.values())


_OF_ITS_NODES: dict[str, Any] = {
    name: Scheduler.model_fields[name].default
    for name in ("memory_per_cpu", "memory_per_gpu", "gres", "reservation", "nodelist", "switches", "hint")
}
"""What a profile says of the nodes of its partition, and means of no other; nothing by default."""


def without_gpus(profile: LoadedProfile, said: Sequence[str] = ()) -> LoadedProfile:
    """The profile for a job that starts no engines: no GPUs, and the site's CPU partition where it is described.

    ``said``: what the user changed in the profile, as ``key=value``; that stays.
    """
    scheduler, asked = profile.profile.scheduler, profile.profile.cpu_partition
    other_gres = tuple(each for each in scheduler.gres if not each.startswith("gpu"))
    if not profile.profile.node.gpus and other_gres == scheduler.gres:
        return profile
    changes: dict[str, Any] = {"node": {"gpus": 0}}
    wanted: dict[str, Any] = {"gres": other_gres, "memory_per_gpu": None}
    if asked is not None:
        own = asked.model_dump(exclude={"cores"})
        inherited = [name for name in ("account", "qos") if own[name] is None]
        wanted = {name: value for name, value in {**_OF_ITS_NODES, **own}.items() if name not in inherited}
        changes["node"]["cores"] = asked.cores
    kept = {text.partition("=")[0].strip().removeprefix("scheduler.") for text in said}
    changes["scheduler"] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in wanted.items()
        if name not in kept and value != getattr(scheduler, name)
    }
    return change_profile(profile, changes, "evaluation.external")


# -- in a directory of its own, or where an earlier one left off ---------------------------------------------------------


def submit_evaluation(loaded: LoadedRecipe, profile: LoadedProfile, run_dir: Path | None) -> Submitted | None:
    """Queue it; None when ``run_dir`` has all of its scores. Raises OccupiedError for a directory of something else."""
    if (run := _earlier(run_dir)) is None:
        return submit_run(loaded, profile, run_dir)
    plan = _check_again(run, loaded, profile)
    if not missing_scores(run, plan):
        return None
    _freeze_again(run, loaded, profile, plan)
    return queue_run(run, plan)


def check_evaluation(loaded: LoadedRecipe, profile: LoadedProfile, run_dir: Path | None) -> Plan:
    """The plan of what `submit_evaluation` would queue. Nothing is written."""
    run = _earlier(run_dir)
    return check_run(loaded, profile, run_dir=run_dir) if run is None else _check_again(run, loaded, profile)


def prepare_evaluation(
    loaded: LoadedRecipe, profile: LoadedProfile, run_dir: Path | None
) -> tuple[RunDir, Plan]:
    """As `submit_evaluation`, but nothing is queued."""
    if (run := _earlier(run_dir)) is None:
        return prepare_run(loaded, profile, run_dir)
    plan = _check_again(run, loaded, profile)
    _freeze_again(run, loaded, profile, plan)
    return run, plan


def _earlier(run_dir: Path | None) -> RunDir | None:
    run = RunDir(run_dir.expanduser().resolve()) if run_dir is not None else None
    return run if run is not None and run.plan.is_file() else None


def _check_again(run: RunDir, loaded: LoadedRecipe, profile: LoadedProfile) -> Plan:
    plan = compile_for(loaded, profile, run.root)
    check_same(run, load_plan(run), plan)
    check_not_running(run)
    return plan


def _freeze_again(run: RunDir, loaded: LoadedRecipe, profile: LoadedProfile, plan: Plan) -> None:
    freeze(run, loaded, profile, plan, make_script(plan, profile))
    register_run(run)


def missing_scores(run: RunDir, plan: Plan) -> list[tuple[int, str]] | Literal["to come"]:
    """Pairs of version and environment without a score; while a live run is watched nobody knows them all."""
    recipe = plan.phase(MAIN_PHASE).recipe
    settings, scores = recipe.evaluation or Evaluation(), read_scores(run)
    if settings.watch:
        return "to come"
    there = run.list_steps(Path(settings.weights), STABLE) if settings.weights else []
    return [
        (version, environment.label)
        for version in settings.versions(there)
        for environment in recipe.environments.eval
        if (version, environment.label) not in scores
    ]


def check_same(run: RunDir, earlier: Plan, plan: Plan) -> None:
    """Raises OccupiedError where scores of both could not stand in one table."""
    if earlier.kind != Kind.EVAL:
        raise OccupiedError(
            f"holds a run of kind {earlier.kind.value}", place=str(run.root), mend="choose another --run-dir"
        )
    before, after = earlier.phase(MAIN_PHASE).recipe, plan.phase(MAIN_PHASE).recipe
    old, new = _facts(before), _facts(after)
    labels = {each.label for each in before.environments.eval} & {
        each.label for each in after.environments.eval
    }
    for label in labels:
        old[f"environment {label}"] = _tasks(before, label)
        new[f"environment {label}"] = _tasks(after, label)
    if different := [name for name in new if old[name] != new[name]]:
        raise OccupiedError(
            f"holds scores of another {different[0]}: {old[different[0]]}, not {new[different[0]]}",
            place=str(run.root),
            mend="choose another --run-dir",
        )


def _facts(recipe: Recipe) -> dict[str, Any]:
    """What scores depend on, beside the environments."""
    settings = recipe.evaluation or Evaluation()
    return {
        "model": recipe.model.name,
        "weights folder": settings.weights,
        "server": settings.external and settings.external.base_url,
        "renderer": recipe.model.renderer.model_dump(),
        "context length": recipe.max_model_len,
        "sampling": recipe.rollouts.sampling.model_dump(),
    }


def _tasks(recipe: Recipe, label: str) -> dict[str, Any]:
    environment = next(each for each in recipe.environments.eval if each.label == label)
    names = {"id", "args", "env_args", "samples", "num_tasks", "sampling"}
    return environment.model_dump(include=names, exclude_defaults=True)


__all__ = [
    "EvalRequest",
    "check_same",
    "find_source",
    "load_evaluation",
    "missing_scores",
    "prepare_evaluation",
    "submit_evaluation",
    "without_gpus",
]
