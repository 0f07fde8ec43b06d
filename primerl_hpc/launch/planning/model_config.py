"""Find a model's config.json without network and without weights: its folder, the hub cache, the known models.

shape = find_shape("Qwen/Qwen3-8B")          # ConfigError in one sentence if it is nowhere or cannot be read
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import ConfigError, NotFoundError
from primerl_hpc.common.names import Kind
from primerl_hpc.launch.hub_cache import cache_folder
from primerl_hpc.plan.predict.shape import ModelShape, known_config, shape_of
from primerl_hpc.recipe.hub import is_hub_id
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.transport.base_models.engine_options import check_engine
from primerl_hpc.transport.base_models.families import check_family
from primerl_hpc.transport.base_models.quantized import check_readable, quantization_of

CONFIG = "config.json"
MAX_BYTES = 10 * 2**20
"""Larger files are not the configuration of a model."""


def find_shape(name: str, variables: Mapping[str, str] | None = None) -> ModelShape:
    """Return the shape of a model folder or hub id.

    ``variables``: environment of the run's processes, which may name another hub cache. Raises ConfigError.
    """
    return shape_of(find_config(name, variables or {}), name)


def has_config(name: str, variables: Mapping[str, str] | None = None) -> bool:
    """True if the model's config.json is known here, so that a plan can be made without its weights."""
    try:
        find_config(name, variables or {})
    except ConfigError:
        return False
    return True


def find_config(name: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of the model's config.json. Raises ConfigError."""
    folder = Path(name).expanduser()
    for path in (folder / CONFIG, *_cached(name, variables)):
        if path.is_file():
            return _read(path)
    try:
        return known_config(name)
    except NotFoundError:
        raise ConfigError(
            f"the shape of model {name} is unknown: its config.json is neither in a folder, nor in the hub cache, nor "
            "among the known models",
            hint=f"hf download {name} {CONFIG}" if is_hub_id(name) else "",
        ) from None


def check_positions(recipe: Recipe, variables: Mapping[str, str]) -> None:
    """Raise ConfigError if engines are to serve more positions than the model has, which vLLM refuses after its start.

    Nothing is checked for models without a known config.json, and for those that scale their positions.
    """
    if not recipe.has_engines or recipe.is_external:
        return
    try:
        config = find_config(recipe.model.name, variables)
    except ConfigError:
        return
    config = config.get("text_config") or config
    most, length = config.get("max_position_embeddings"), recipe.max_model_len
    scaling = [config.get("rope_scaling"), config.get("rope_parameters")]
    if not isinstance(most, int) or length <= most or "factor" in json.dumps(scaling):
        return
    key = "seq_len" if recipe.inference.max_model_len == "auto" else "inference.max_model_len"
    raise ConfigError(
        f"{key} {length} exceeds the {most} positions of the model (max_position_embeddings of its config.json)",
        hint=f"set {key} to at most {most}, or choose a model with longer context",
    )


def refuse_untrainable(
    recipe: Recipe, variables: Mapping[str, str] | None = None, accelerator: str = "gpu"
) -> None:
    """Raise ConfigError if the recipe trains a family that no test compares, or a quantization that cannot be trained,
    or if its engines on this ``accelerator`` compute another policy.

    Engines keep the quantization of the checkpoint that they load, so they cannot take the trainer's bfloat16 weights.
    Without config.json nothing is checked.
    """
    name, variables = recipe.model.name, variables or {}
    if recipe.kind not in (Kind.RL, Kind.SFT) or not has_config(name, variables):
        return
    config = find_config(name, variables)
    check_family(config.get("model_type"), name, is_untested=recipe.model.untested)
    if recipe.kind == Kind.RL:
        check_engine(config.get("model_type"), name, accelerator, is_untested=recipe.model.untested)
    if (quantization := quantization_of(config)) is None:
        return
    check_readable(quantization, name)
    if recipe.has_engines:
        raise ConfigError(
            f"model {name} is quantized ({quantization['quant_method']}), "
            "so its engines cannot take the trainer's bfloat16 weights",
            hint=f"run primerl-hpc convert {name} --to FOLDER, and set model.name to the folder",
        )


def find_file(name: str, file: str, variables: Mapping[str, str]) -> Path | None:
    """Return a file of a model folder, or of a hub id in the cache; None if it is not here."""
    candidates = (Path(name).expanduser() / file, *_cached(name, variables, file))
    return next((path for path in candidates if path.is_file()), None)


def _cached(name: str, variables: Mapping[str, str], file: str = CONFIG) -> list[Path]:
    """Return candidates in the hub cache: the revision of ``main``, then other snapshots by name."""
    if name.count("/") != 1:
        return []
    root = cache_folder(variables) / f"models--{name.replace('/', '--')}"
    snapshots = sorted(root.glob(f"snapshots/*/{file}"))
    try:
        main = (root / "refs" / "main").read_text().strip()
    except OSError:
        return snapshots
    return [root / "snapshots" / main / file, *snapshots]


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} is too large to be the configuration of a model")
        config = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{path} is not valid JSON: {type(error).__name__}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must contain a JSON object")
    return config
