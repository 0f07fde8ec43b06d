"""Looks at the disk before anything is queued: names become absolute folders, missing files are refused.

The planner is a pure function; this is the step before it that is not.
"""

from __future__ import annotations

from pathlib import Path

from primerl_hpc.common.errors import ConfigError, DataError, NotFoundError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.rundir import STABLE, RunDir
from primerl_hpc.common.yamldoc import Document
from primerl_hpc.recipe.combinations import MAX_SERVED_RANK
from primerl_hpc.recipe.evaluation_schema import Evaluation
from primerl_hpc.recipe.hub import SUFFIXES, is_hub_id
from primerl_hpc.recipe.load import LoadedRecipe
from primerl_hpc.recipe.schema import Model, Recipe
from primerl_hpc.recipe.sft_rows import check_row
from primerl_hpc.recipe.sft_schema import SFT, SFTData
from primerl_hpc.recipe.sft_tables import data_files, first_jsonl_rows
from primerl_hpc.recipe.training_schema import Fork, LoRA

CHECKED_ROWS = 5000


def resolve(loaded: LoadedRecipe, *, folder: Path | None = None) -> Recipe:
    """The recipe with local models and datasets as absolute paths; relative ones are seen from ``folder`` (default: here).

    Raises NotFoundError or DataError naming the key's place, the path and what is missing in it.
    """
    folder = folder or Path.cwd()
    recipe, document = loaded.recipe, loaded.document
    changes: dict[str, object] = {}
    if not recipe.is_external:
        changes["model"] = _resolve_model(recipe.model, document, folder, ("model",))
    for role, frozen in recipe.served_models.items():
        model = _resolve_model(frozen.model, document, folder, (role.value, "model"))
        changes[role.value] = frozen.model_copy(update={"model": model})
    if recipe.evaluation is not None and recipe.evaluation.weights is not None:
        evaluation = _resolve_evaluation(recipe.evaluation, document, folder)
        changes |= {"evaluation": evaluation, "lora": _adapters_in(evaluation, recipe.lora, document)}
    if recipe.sft is not None:
        changes["sft"] = _resolve_sft(recipe.sft, document, folder, ("sft",))
    if recipe.warmup is not None:
        sft = _resolve_sft(recipe.warmup.sft, document, folder, ("warmup", "sft"))
        changes["warmup"] = recipe.warmup.model_copy(update={"sft": sft})
    if recipe.checkpoint.fork is not None:
        fork = _resolve_fork(recipe.checkpoint.fork, recipe.steps, document, folder)
        changes["checkpoint"] = recipe.checkpoint.model_copy(update={"fork": fork})
    if recipe.after is not None and recipe.after.export is not None:
        to = (folder / Path(recipe.after.export.to).expanduser()).resolve()
        export = recipe.after.export.model_copy(update={"to": str(to)})
        changes["after"] = recipe.after.model_copy(update={"export": export})
    return recipe.model_copy(update=changes)


def resolve_model(loaded: LoadedRecipe, *, folder: Path | None = None) -> Recipe:
    """The recipe with its model as an absolute folder, of which only ``config.json`` has to be there.

    Raises NotFoundError or DataError.
    """
    folder = folder or Path.cwd()
    model = loaded.recipe.model
    if is_hub_id(model.name, folder):
        return loaded.recipe
    path = (folder / Path(model.name).expanduser()).resolve()
    _check_config(path, loaded.document.place(("model", "name")))
    return loaded.recipe.model_copy(update={"model": model.model_copy(update={"name": str(path)})})


def _resolve_fork(fork: Fork, max_steps: int, document: Document, folder: Path) -> Fork:
    """Absolute path and the step's number.

    Raises NotFoundError where there is no such complete checkpoint, ConfigError where it leaves no step to do.
    """
    root = (folder / Path(fork.run).expanduser()).resolve()
    run, place = RunDir(root), document.place(("checkpoint", "fork"))
    if not run.plan.is_file():
        raise NotFoundError(f"{root} is no run directory", place=place)
    complete = run.complete_checkpoints()
    if not complete or fork.step not in (None, *complete):
        have = f"it has {', '.join(map(str, complete))}" if complete else "it has none"
        wanted = (
            "no complete checkpoint" if fork.step is None else f"no complete checkpoint of step {fork.step}"
        )
        raise NotFoundError(f"{root} has {wanted}", place=place, mend=have)
    step = fork.step or complete[-1]
    if step >= max_steps:
        raise ConfigError(
            f"checkpoint {step} of {root} is at or beyond max_steps {max_steps}: steps count on",
            place=place,
            mend=f"raise max_steps, or fork from an earlier step: {', '.join(map(str, complete))}",
        )
    return fork.model_copy(update={"run": str(root), "step": step})


def _resolve_evaluation(evaluation: Evaluation, document: Document, folder: Path) -> Evaluation:
    """Absolute folder. Raises NotFoundError where it has none of the versions, unless they are waited for."""
    assert evaluation.weights is not None
    weights = (folder / Path(evaluation.weights).expanduser()).resolve()
    run, place = RunDir(weights.parent), document.place(("evaluation", "weights"))
    if evaluation.watch and not run.plan.is_file():
        raise NotFoundError(f"{run.root} is no run directory that could be watched", place=place)
    versions = run.list_steps(weights, STABLE)
    if not evaluation.watch and not versions:
        raise NotFoundError(
            f"{weights} has no complete policy version (step_N/{STABLE})",
            place=place,
            mend="a run of kind sft writes its last one at its end, and more with weights.interval",
        )
    asked = () if evaluation.steps == "all" else evaluation.steps
    missing = [step for step in asked if step not in versions]
    if missing and not evaluation.watch:
        there = ", ".join(map(str, versions))
        raise NotFoundError(
            f"{weights} has no weights of step {missing[0]}",
            place=place,
            mend=f"there are those of {there}; weights.keep_last and weights.interval say which a run keeps",
        )
    return evaluation.model_copy(update={"weights": str(weights)})


def _adapters_in(evaluation: Evaluation, said: LoRA | None, document: Document) -> LoRA | None:
    """What an engine must know of the adapters in ``evaluation.weights``; None where those are whole models.

    ``said``: the recipe's word, for versions that are still to come. Raises ConfigError for adapters that vLLM cannot serve.
    """
    weights = Path(evaluation.weights or "")
    versions = RunDir(weights.parent).list_steps(weights, STABLE)
    if not versions:
        return said
    config = read_json_or_none(weights / f"step_{versions[-1]}" / "adapter_config.json")
    if config is None:
        return None
    if config["r"] > MAX_SERVED_RANK:
        raise ConfigError(
            f"{weights} holds adapters of rank {config['r']}, and vLLM serves at most rank {MAX_SERVED_RANK}",
            place=document.place(("evaluation", "weights")),
            mend="primerl-hpc export --merge makes a model of one",
        )
    return LoRA(rank=config["r"], alpha=float(config["lora_alpha"]))


def _resolve_model(model: Model, document: Document, folder: Path, key: tuple[str, ...]) -> Model:
    changes: dict[str, str] = {}
    if not is_hub_id(model.name, folder):
        path = (folder / Path(model.name).expanduser()).resolve()
        _check_model_folder(path, document.place((*key, "name")))
        changes["name"] = str(path)
    if model.tokenizer and not is_hub_id(model.tokenizer, folder):
        path = (folder / Path(model.tokenizer).expanduser()).resolve()
        _check_tokenizer(path, document.place((*key, "tokenizer")))
        changes["tokenizer"] = str(path)
    return model.model_copy(update=changes)


def _check_config(path: Path, place: str) -> None:
    if not path.is_dir():
        raise NotFoundError(
            f"model folder {path} does not exist",
            place=place,
            mend="give a folder with config.json and safetensors, or a hub id, owner/name; tools/tiny-model makes a tiny one",
        )
    if not (path / "config.json").is_file():
        raise DataError(
            f"model folder {path} has no config.json", place=place, mend="it must be an HF model folder"
        )


def _check_model_folder(path: Path, place: str) -> None:
    _check_config(path, place)
    if not any(path.glob("*.safetensors")):
        raise DataError(
            f"model folder {path} has no weights (*.safetensors)",
            place=place,
            mend="save the model with save_pretrained, which writes safetensors",
        )
    _check_tokenizer(path, place)


def _check_tokenizer(path: Path, place: str) -> None:
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if not any((path / name).is_file() for name in names):
        raise DataError(
            f"folder {path} has no tokenizer ({', '.join(names)})",
            place=place,
            mend="save the tokenizer there, beside the model; a hub id is owner/name",
        )


def _resolve_sft(sft: SFT, document: Document, folder: Path, path: tuple[str, ...]) -> SFT:
    places = [(*path, "data", index) for index in range(len(sft.sources))]
    if isinstance(sft.data, SFTData):
        places = [(*path, "data")]
    sources = tuple(
        _resolve_data(source, document, folder, place)
        for source, place in zip(sft.sources, places, strict=True)
    )
    changes: dict[str, object] = {"data": sources if isinstance(sft.data, tuple) else sources[0]}
    if sft.validation is not None:
        data = _resolve_data(sft.validation.data, document, folder, (*path, "validation", "data"))
        changes["validation"] = sft.validation.model_copy(update={"data": data})
    return sft.model_copy(update=changes)


def _resolve_data(data: SFTData, document: Document, folder: Path, path: tuple[str | int, ...]) -> SFTData:
    if is_hub_id(data.path, folder):
        return data
    found = (folder / Path(data.path).expanduser()).resolve()
    if not found.exists():
        raise NotFoundError(
            f"dataset {found} does not exist",
            place=document.place((*path, "path")),
            mend="give a file, a folder, or a hub id: owner/name",
        )
    check_rows(found)
    return data.model_copy(update={"path": str(found)})


def check_rows(path: Path) -> None:
    """The first `CHECKED_ROWS` rows hold conversations; the trainer checks the rest.

    Raises DataError naming file, row and column.
    """
    is_saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
    if not is_saved and not (data_files(path) if path.is_dir() else path.suffix in SUFFIXES):
        raise DataError(
            "no SFT rows", place=str(path), mend=f"give a {' or '.join(SUFFIXES)} file, or a folder of them"
        )
    if path.suffix != ".jsonl" or path.is_dir():
        return  # a login node need not have pyarrow
    rows = list(first_jsonl_rows(path, CHECKED_ROWS))
    if not rows:
        raise DataError("no SFT rows", place=str(path))
    for row in rows:
        check_row(row)
