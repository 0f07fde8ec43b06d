"""Find a model's config.json without network and without weights: its folder, the hub cache, the known models.

model = read_model(recipe, profile)          # once for each submission
model.shape                                  # ConfigError in one sentence if it is nowhere or cannot be read
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError, NotFoundError
from primerl_hpc.common.log import show_warnings
from primerl_hpc.common.model_families import ALIASES, check_named, check_tower, family_of
from primerl_hpc.common.names import Kind, Role
from primerl_hpc.plan.env import inherited_env, process_env
from primerl_hpc.plan.predict.shape import ModelShape, known_config, shape_of
from primerl_hpc.recipe.hub import is_hub_id
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.training import TOWER_KEYS
from primerl_hpc.transport.base_models.engine_options import check_engine
from primerl_hpc.transport.base_models.hub_cache import cache_folder
from primerl_hpc.transport.base_models.quantized import check_readable, quantization_of

CONFIG = "config.json"
MAX_BYTES = 10 * 2**20
"""Larger files are not the configuration of a model."""


@dataclass(frozen=True)
class ModelConfig:
    """The config.json of a model folder or hub id, or why it is unknown here."""

    name: str
    variables: Mapping[str, str]
    """Environment of the run's processes, which may name another hub cache."""
    content: Mapping[str, Any] | None
    """None if it is unknown; `fault` is the reason."""
    fault: ConfigError | None = None

    @cached_property
    def shape(self) -> ModelShape:
        """The shape of the model. Raises ConfigError."""
        if self.content is None:
            assert self.fault is not None
            raise self.fault
        return shape_of(self.content, self.name)


def read_model(recipe: Recipe, profile: Profile) -> ModelConfig:
    """Read the configuration of the recipe's policy as its engines or trainer find it."""
    role = Role.INFERENCE if recipe.has_engines else Role.TRAINER
    inherited = inherited_env(role, recipe, profile).items()
    given = {name: value for name, source in inherited if (value := env.variable(source)) is not None}
    return load_config(recipe.model.name, process_env(role, recipe, profile) | given)


def load_config(name: str, variables: Mapping[str, str] | None = None) -> ModelConfig:
    """Read the configuration of a model in the environment ``variables``; never raises."""
    try:
        return ModelConfig(name, variables or {}, find_config(name, variables or {}))
    except ConfigError as error:
        return ModelConfig(name, variables or {}, None, error)


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


def check_positions(recipe: Recipe, model: ModelConfig) -> None:
    """Raise ConfigError if engines are to serve more positions than the model has, which vLLM refuses after its start.

    Nothing is checked for models without a known config.json, and for those that scale their positions.
    """
    if not recipe.has_engines or recipe.is_external or model.content is None:
        return
    config = model.content.get("text_config") or model.content
    most, length = config.get("max_position_embeddings"), recipe.max_model_len
    scaling = [config.get("rope_scaling"), config.get("rope_parameters")]
    if not isinstance(most, int) or length <= most or "factor" in json.dumps(scaling):
        return
    key = "seq_len" if recipe.inference.max_model_len == "auto" else "inference.max_model_len"
    raise ConfigError(
        f"{key} {length} exceeds the {most} positions of the model (max_position_embeddings of its config.json)",
        hint=f"set {key} to at most {most}, or choose a model with longer context",
    )


def refuse_untrainable(recipe: Recipe, model: ModelConfig, accelerator: str = "gpu") -> None:
    """Raise ConfigError if the recipe trains a quantization or a tower that cannot be trained, or if its engines
    on this ``accelerator`` compute another policy. Warns of a family that no test compares.

    Engines keep the quantization of the checkpoint that they load, so they cannot take the trainer's bfloat16 weights.
    Without config.json nothing is checked.
    """
    name, config = recipe.model.name, model.content
    if recipe.kind not in (Kind.RL, Kind.SFT) or config is None:
        return
    family, is_accepted = config.get("model_type"), recipe.model.accept_uncompared
    check_named(family, name)
    if not is_accepted and not family_of(ALIASES.get(str(family), family)).is_compared:
        show_warnings(
            [f"no test compares family {family} with transformers: the trainer compares it when it starts"]
        )
    if (key := recipe.trainer.vision) in TOWER_KEYS:
        layout = recipe.layout.trainer
        context = 1 if layout.context_parallel == "auto" else layout.context_parallel
        degrees = {"context": context, "tensor": layout.tensor_degree}
        check_tower(family, name, f"trainer.vision is {key}", degrees)
    if recipe.kind == Kind.RL:
        check_engine(family, name, accelerator, is_accepted=is_accepted)
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
