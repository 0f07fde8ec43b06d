"""List what a run loads that may come from the internet: models, datasets, packages, environments, container images.

    needs = needs_of(recipe, profile)       # [Need(MODEL, "Qwen/Qwen3-4B", …), Need(DATASET, "org/rows", …), …]

Nothing is read from disk, except to decide whether a name is a path.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.cluster.software_schema import Container
from primerl_hpc.common.names import Kind, Role
from primerl_hpc.launch.hub_cache import cache_folder
from primerl_hpc.plan.env import process_env
from primerl_hpc.recipe.hub import is_hub_id
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.rollout import Environment

_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


class NeedKind(StrEnum):
    MODEL = "model"
    TOKENIZER = "tokenizer"
    DATASET = "dataset"
    PACKAGE = "package"
    ENVIRONMENT = "environment"
    IMAGE = "image"


@dataclass(frozen=True)
class Need:
    kind: NeedKind
    name: str
    """Hub id, id of an environment, or address of an image."""
    role: Role
    """First role that loads it."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of this role, without the offline mode."""
    python: str | None = None
    """Interpreter of this role; None: it is inside a container."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """Block of the recipe: ``SFTData`` or ``Environment``; of a package its interpreter."""
    container: Container | None = None
    """Container of an image."""

    @property
    def label(self) -> str:
        """The name, and the arguments of an environment, with which a recipe may use it several times."""
        arguments = {**(self.source.get("args") or {}), **(self.source.get("env_args") or {})}
        return f"{self.name} {json.dumps(arguments)}" if arguments else self.name

    @property
    def identity(self) -> tuple[str, ...]:
        """Two needs of equal identity are one: same thing in the same cache."""
        source = json.dumps(self.source, sort_keys=True)
        return (self.kind.value, self.name, str(cache_folder(self.variables)), source)


def needs_of(recipe: Recipe, profile: Profile, folder: Path | None = None) -> list[Need]:
    """Return everything that is not a local file, in the order in which a run loads it.

    ``folder``: base of relative paths of a recipe that is not resolved yet.
    """
    found = [
        *_images(recipe, profile),
        *_models(recipe, profile, folder),
        *_datasets(recipe, profile, folder),
        *_packages(recipe, profile),
        *_environments(recipe, profile),
    ]
    unique: dict[tuple[str, ...], Need] = {}
    for need in found:
        unique.setdefault(need.identity, need)
    return list(unique.values())


def roles_of(recipe: Recipe) -> list[Role]:
    """Return the roles of a recipe that load models, data or environments."""
    roles: list[Role] = []
    if recipe.kind != Kind.SFT or recipe.is_evaluated_online:
        roles += [Role.INFERENCE] if not recipe.is_external else []
        roles += [Role.ORCHESTRATOR if recipe.kind != Kind.EVAL else Role.EVALUATOR, Role.ENV_SERVER]
    if recipe.kind == Kind.RL:
        roles.append(Role.TRAINER)
    if recipe.kind == Kind.SFT or recipe.warmup is not None:
        roles.append(Role.SFT)
    return [*roles, *recipe.served_models]


def _need(kind: NeedKind, name: str, role: Role, recipe: Recipe, profile: Profile, **more: Any) -> Need:
    software = profile.software.of_role(role)
    variables = process_env(role, recipe, profile)
    python = None if software.container.kind != "none" else software.python or _default_python(profile)
    online = {key: value for key, value in variables.items() if key not in _OFFLINE}
    return Need(kind, name, role, online, python, **more)


def _default_python(profile: Profile) -> str:
    return profile.software.host_python or sys.executable


def _models(recipe: Recipe, profile: Profile, folder: Path | None) -> Iterator[Need]:
    roles = roles_of(recipe)
    own = [role for role in roles if role in (Role.INFERENCE, Role.TRAINER, Role.SFT)]
    models = [(recipe.model, role) for role in own]
    models += [(frozen.model, role) for role, frozen in recipe.served_models.items()]
    for model, role in models:
        for kind, name in ((NeedKind.MODEL, model.name), (NeedKind.TOKENIZER, model.tokenizer)):
            if name is not None and is_hub_id(name, folder):
                yield _need(kind, name, role, recipe, profile)


def _datasets(recipe: Recipe, profile: Profile, folder: Path | None) -> Iterator[Need]:
    blocks = [recipe.sft, recipe.warmup.sft if recipe.warmup is not None else None]
    for block in blocks:
        if block is None:
            continue
        sources = block.data if isinstance(block.data, tuple) else (block.data,)
        for source in (*sources, *([block.validation.data] if block.validation is not None else [])):
            if is_hub_id(source.path, folder):
                fields = source.model_dump(mode="json", include={"path", "subset"})
                fields["split"] = source.named_split
                yield _need(NeedKind.DATASET, source.path, Role.SFT, recipe, profile, source=fields)


def environments_of(recipe: Recipe) -> tuple[Environment, ...]:
    """Return all environments of a recipe, including those of the evaluation that follows."""
    after = recipe.after.evaluation if recipe.after is not None else None
    return (
        *recipe.environments.train,
        *recipe.environments.eval,
        *(after.environments if after is not None else ()),
    )


def _packages(recipe: Recipe, profile: Profile) -> Iterator[Need]:
    """Yield the package of each environment once for each interpreter that loads it."""
    for environment in environments_of(recipe):
        if environment.package is None:
            continue
        for role in (_loader(recipe), *(() if environment.address else (Role.ENV_SERVER,))):
            need = _need(NeedKind.PACKAGE, environment.package, role, recipe, profile)
            yield replace(need, source={"python": need.python})


def _loader(recipe: Recipe) -> Role:
    """Return the role that loads tasks."""
    return Role.EVALUATOR if recipe.kind == Kind.EVAL else Role.ORCHESTRATOR


def _environments(recipe: Recipe, profile: Profile) -> Iterator[Need]:
    loader = _loader(recipe)
    for environment in environments_of(recipe):
        fields = environment.model_dump(mode="json", include={"id", "args", "env_args"})
        yield _need(NeedKind.ENVIRONMENT, environment.id, loader, recipe, profile, source=fields)


def _images(recipe: Recipe, profile: Profile) -> Iterator[Need]:
    for role in roles_of(recipe):
        container = profile.software.of_role(role).container
        if container.kind != "none" and container.image is not None:
            yield Need(NeedKind.IMAGE, container.image, role, container=container)
