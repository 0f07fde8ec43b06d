"""Resolve a recipe against the filesystem: relative names become absolute paths, missing files are errors.

`resolve` runs before the planner, which is a pure function, and before anything is queued.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from primerl_hpc.common.document import Document
from primerl_hpc.common.errors import ConfigError, DataError, NotFoundError, PrimerlError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.model_files import check_pointers, read_weights
from primerl_hpc.recipe.hub import SUFFIXES, is_hub_id
from primerl_hpc.recipe.load import LoadedRecipe
from primerl_hpc.recipe.renderer import WITHOUT_TOOLS
from primerl_hpc.recipe.schema.evaluation import EvaluationSettings
from primerl_hpc.recipe.schema.model import MAX_SERVED_RANK
from primerl_hpc.recipe.schema.recipe import Model, Recipe
from primerl_hpc.recipe.schema.run import Fork
from primerl_hpc.recipe.schema.sft import SFT, SFTData
from primerl_hpc.recipe.schema.training import ABSORBED, LoRA
from primerl_hpc.recipe.sft.folders import data_files
from primerl_hpc.recipe.sft.rows import check_row
from primerl_hpc.recipe.sft.tables import first_rows
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import STABLE

CHECKED_ROWS = 5000
"""Number of SFT rows of a source that are checked before submission; the trainer checks the rest."""


@dataclass(frozen=True)
class _Context:
    """Where relative paths start, and what happens to errors about missing files."""

    document: Document
    folder: Path
    missing: list[PrimerlError] | None
    """Collects the errors; None: raise them."""

    def absolute(self, path: str) -> Path:
        return (self.folder / Path(path).expanduser()).resolve()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect NotFoundError and DataError in ``missing`` if the caller of `resolve` passed a list; else raise."""
        try:
            yield
        except (NotFoundError, DataError) as error:
            if self.missing is None:
                raise
            self.missing.append(error)


def resolve(
    loaded: LoadedRecipe, *, folder: Path | None = None, missing: list[PrimerlError] | None = None
) -> Recipe:
    """Return the recipe with local models and datasets as absolute paths.

    ``folder``: base of relative paths (default: the current directory).
    ``missing``: a list that collects errors about missing files instead of raising them, for a plan that is only shown.
    Raises NotFoundError or DataError with the location of the key, the path, and what is missing.
    """
    folder = folder or Path.cwd()
    recipe, document = loaded.recipe, loaded.document
    context = _Context(document, folder, missing)
    changes: dict[str, object] = {}
    if not recipe.is_external:
        changes["model"] = _resolve_model(recipe.model, context, ("model",))
    if recipe.inference.adapter_dirs:
        folders = tuple(str(context.absolute(path)) for path in recipe.inference.adapter_dirs)
        changes["inference"] = recipe.inference.model_copy(update={"adapter_dirs": folders})
    for role, frozen in recipe.served_models.items():
        model = _resolve_model(frozen.model, context, (role.value, "model"))
        changes[role.value] = frozen.model_copy(update={"model": model})
    if recipe.evaluation is not None and recipe.evaluation.weights is not None:
        evaluation = _resolve_evaluation(recipe.evaluation, context)
        changes |= {"evaluation": evaluation, "lora": _adapters_in(evaluation, recipe.lora, document)}
    if recipe.sft is not None:
        changes["sft"] = _resolve_sft(recipe.sft, recipe.model, context, ("sft",))
    if recipe.warmup is not None:
        sft = _resolve_sft(recipe.warmup.sft, recipe.model, context, ("warmup", "sft"))
        changes["warmup"] = recipe.warmup.model_copy(update={"sft": sft})
    if recipe.checkpoint.fork is not None:
        fork = _resolve_fork(recipe.checkpoint.fork, recipe.steps, context)
        changes["checkpoint"] = recipe.checkpoint.model_copy(update={"fork": fork})
    if recipe.after is not None and recipe.after.export is not None:
        to = (folder / Path(recipe.after.export.to).expanduser()).resolve()
        export = recipe.after.export.model_copy(update={"to": str(to)})
        changes["after"] = recipe.after.model_copy(update={"export": export})
    return recipe.model_copy(update=changes)


def resolve_model(loaded: LoadedRecipe, *, folder: Path | None = None) -> Recipe:
    """Return the recipe with its model as an absolute path; of the folder only ``config.json`` must exist.

    Raises NotFoundError or DataError.
    """
    folder = folder or Path.cwd()
    model = loaded.recipe.model
    if is_hub_id(model.name, folder):
        return loaded.recipe
    path = (folder / Path(model.name).expanduser()).resolve()
    _check_config(path, loaded.document.location(("model", "name")))
    return loaded.recipe.model_copy(update={"model": model.model_copy(update={"name": str(path)})})


def _resolve_fork(fork: Fork, max_steps: int, context: _Context) -> Fork:
    """Return the fork with an absolute path and a step number.

    Raises NotFoundError if there is no such complete checkpoint, ConfigError if no step would remain.
    """
    root = context.absolute(fork.run)
    fork = fork.model_copy(update={"run": str(root)})
    with context.collecting():
        return _with_step(fork, root, max_steps, context.document.location(("checkpoint", "fork")))
    return fork


def _with_step(fork: Fork, root: Path, max_steps: int, location: str) -> Fork:
    run = RunDir(root)
    if not run.plan.is_file():
        raise NotFoundError(
            f"{root} is not a run directory: it has no plan.json",
            location=location,
            hint="set checkpoint.fork.run to the directory of a run",
        )
    complete = run.complete_checkpoints()
    if not complete or fork.step not in (None, *complete):
        have = f"it has {', '.join(map(str, complete))}" if complete else "it has none"
        wanted = (
            "no complete checkpoint" if fork.step is None else f"no complete checkpoint of step {fork.step}"
        )
        raise NotFoundError(f"{root} has {wanted}", location=location, hint=have)
    step = fork.step or complete[-1]
    if step >= max_steps:
        raise ConfigError(
            f"checkpoint {step} of {root} is not less than max_steps {max_steps}: a forked run continues "
            "the step count",
            location=location,
            hint=f"increase max_steps, or fork from an earlier step: {', '.join(map(str, complete))}",
        )
    return fork.model_copy(update={"step": step})


def _resolve_evaluation(evaluation: EvaluationSettings, context: _Context) -> EvaluationSettings:
    """Return the block with an absolute folder.

    Raises NotFoundError if the folder lacks the versions, unless ``watch`` waits for them.
    """
    assert evaluation.weights is not None
    weights = context.absolute(evaluation.weights)
    with context.collecting():
        _check_versions(evaluation, weights, context.document.location(("evaluation", "weights")))
    return evaluation.model_copy(update={"weights": str(weights)})


def _check_versions(evaluation: EvaluationSettings, weights: Path, location: str) -> None:
    run = RunDir(weights.parent)
    if evaluation.watch and not run.plan.is_file():
        raise NotFoundError(
            f"{run.root} is not a run directory, so evaluation.watch cannot follow it",
            location=location,
            hint="set evaluation.weights to the folder weights of a run, or watch to false",
        )
    versions = run.list_steps(weights, STABLE)
    if not evaluation.watch and not versions:
        raise NotFoundError(
            f"{weights} has no complete policy version (step_N/{STABLE})",
            location=location,
            hint="a run of kind sft writes its last version at the end, and others with weights.interval",
        )
    requested = () if evaluation.steps == "all" else evaluation.steps
    missing = [step for step in requested if step not in versions]
    if missing and not evaluation.watch:
        raise NotFoundError(
            f"{weights} has no weights of step {missing[0]}",
            location=location,
            hint=f"it has steps {', '.join(map(str, versions))}; weights.keep_last and weights.interval of the run "
            "control which versions are kept",
        )


def _adapters_in(evaluation: EvaluationSettings, configured: LoRA | None, document: Document) -> LoRA | None:
    """Return the settings of the adapters in ``evaluation.weights``, or None if it holds full models.

    ``configured``: the recipe's ``lora``, used while the folder has no versions yet.
    Raises ConfigError for adapters that vLLM cannot serve.
    """
    weights = Path(evaluation.weights or "")
    versions = RunDir(weights.parent).list_steps(weights, STABLE)
    if not versions:
        return configured
    config = read_json_or_none(weights / f"step_{versions[-1]}" / "adapter_config.json")
    if config is None:
        return None
    if config["r"] > MAX_SERVED_RANK:
        raise ConfigError(
            f"{weights} holds adapters of rank {config['r']}, but vLLM serves at most rank {MAX_SERVED_RANK}",
            location=document.location(("evaluation", "weights")),
            hint="merge an adapter into its base model with primerl-hpc export --merge, and evaluate that",
        )
    if ABSORBED in config.get("target_modules", ()):
        raise ConfigError(
            f"{weights} holds adapters of {ABSORBED}, which vLLM ignores",
            location=document.location(("evaluation", "weights")),
            hint="merge an adapter into its base model with primerl-hpc export --merge, and evaluate that",
        )
    is_stabilized = bool(config.get("use_rslora"))
    return LoRA(rank=config["r"], alpha=float(config["lora_alpha"]), rank_stabilized=is_stabilized)


def _resolve_model(model: Model, context: _Context, key: tuple[str, ...]) -> Model:
    changes: dict[str, str] = {}
    if not is_hub_id(model.name, context.folder):
        path = context.absolute(model.name)
        with context.collecting():
            _check_model_folder(path, context.document.location((*key, "name")))
        changes["name"] = str(path)
    if model.tokenizer and not is_hub_id(model.tokenizer, context.folder):
        path = context.absolute(model.tokenizer)
        with context.collecting():
            _check_tokenizer(path, context.document.location((*key, "tokenizer")))
        changes["tokenizer"] = str(path)
    return model.model_copy(update=changes)


def _check_config(path: Path, location: str) -> None:
    if not path.is_dir():
        raise NotFoundError(
            f"model folder {path} does not exist",
            location=location,
            hint="give a folder with config.json and safetensors, relative to the current folder, or a hub id "
            "(owner/name); tools/tiny-model makes a tiny model",
        )
    if not (path / "config.json").is_file():
        raise DataError(
            f"model folder {path} has no config.json",
            location=location,
            hint="give a folder in the format of transformers (save_pretrained)",
        )


def _check_model_folder(path: Path, location: str) -> None:
    _check_config(path, location)
    if not any(path.glob("*.safetensors")):
        raise DataError(
            f"model folder {path} has no weights (*.safetensors)",
            location=location,
            hint="save the model with save_pretrained, which writes safetensors",
        )
    _check_tokenizer(path, location)
    check_pointers(path)
    read_weights(path)


def _check_tokenizer(path: Path, location: str) -> None:
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if not any((path / name).is_file() for name in names):
        raise DataError(
            f"folder {path} has no tokenizer ({', '.join(names)})",
            location=location,
            hint="save the tokenizer in this folder, or give a hub id (owner/name)",
        )


def _resolve_sft(sft: SFT, model: Model, context: _Context, path: tuple[str, ...]) -> SFT:
    keys = [(*path, "data", index) for index in range(len(sft.sources))]
    if isinstance(sft.data, SFTData):
        keys = [(*path, "data")]
    sources = tuple(
        _resolve_data(source, sft, model, context, key) for source, key in zip(sft.sources, keys, strict=True)
    )
    changes: dict[str, object] = {"data": sources if isinstance(sft.data, tuple) else sources[0]}
    if sft.validation is not None:
        data = _resolve_data(sft.validation.data, sft, model, context, (*path, "validation", "data"))
        changes["validation"] = sft.validation.model_copy(update={"data": data})
    return sft.model_copy(update=changes)


def _resolve_data(
    data: SFTData, sft: SFT, model: Model, context: _Context, path: tuple[str | int, ...]
) -> SFTData:
    if is_hub_id(data.path, context.folder):
        return data
    found = context.absolute(data.path)
    with context.collecting():
        if not found.exists():
            raise NotFoundError(
                f"dataset {found} does not exist",
                location=context.document.location((*path, "path")),
                hint="give a file or a folder, relative to the current folder, or a hub id (owner/name)",
            )
        count = min(data.num_rows or CHECKED_ROWS, CHECKED_ROWS)
        check_rows(found, count, model.renderer.name, data.split, sft.ignored_keys)
    return data.model_copy(update={"path": str(found)})


def check_rows(
    path: Path, count: int, renderer: str, split: str | None = None, ignored: Collection[str] = ()
) -> None:
    """Check that the first ``count`` rows hold conversations that ``renderer`` can render.

    ``split``: the split of a folder; ``ignored``: ``sft.ignored_keys``. Raises DataError with file, row and column, or
    for a folder of several splits.
    """
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        return  # Only package datasets can read it, which may be missing on a login node.
    if not (data_files(path, split) if path.is_dir() else path.suffix in SUFFIXES):
        raise DataError(
            "there are no SFT rows",
            location=str(path),
            hint=f"give a {' or '.join(SUFFIXES)} file, or a folder of them",
        )
    plain = f"renderer '{renderer}'" if renderer in WITHOUT_TOOLS else None
    num_rows = 0
    for row in first_rows(path, count, split):
        check_row(row, plain, ignored)
        num_rows += 1
    if path.suffix == ".jsonl" and not num_rows:
        raise DataError("there are no SFT rows", location=str(path))
