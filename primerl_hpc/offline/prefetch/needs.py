"""List what a run loads that may come from the internet: models, datasets, packages, environments, container images.

    needs = needs_of(recipe, profile)       # [Need(MODEL, "Qwen/Qwen3-4B", …), Need(DATASET, "org/rows", …), …]

Nothing is read from disk, except to decide whether a name is a path.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.cluster.software_schema import Container
from primerl_hpc.common.names import Kind, Role
from primerl_hpc.plan.env import process_env
from primerl_hpc.plan.plan import Plan
from primerl_hpc.recipe.hub import is_hub_id
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.rollout import Environment
from primerl_hpc.transport.base_models.hub_cache import cache_folder, is_true, value_of

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


class NeedKind(StrEnum):
    MODEL = "model"
    TOKENIZER = "tokenizer"
    DATASET = "dataset"
    PACKAGE = "package"
    ENVIRONMENT = "environment"
    IMAGE = "image"


Load = tuple[NeedKind, str, Role, dict[str, Any]]
"""One thing that a role loads: its kind, its name, the role, and the block of the recipe."""


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
    is_offline: bool = False
    """The role may not use the network (``HF_HUB_OFFLINE``)."""

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

    @cache
    def place(role: Role) -> tuple[dict[str, str], str | None]:
        software = profile.software.of_role(role)
        is_here = software.container.kind == "none"
        python = (software.python or profile.software.python_here) if is_here else None
        return process_env(role, recipe, profile), python

    unique: dict[tuple[str, ...], Need] = {}
    for role in roles_of(recipe):
        container = profile.software.of_role(role).container
        if container.kind != "none" and container.image is not None:
            need = Need(NeedKind.IMAGE, container.image, role, container=container)
            unique.setdefault(need.identity, need)
    loads = (_models(recipe, folder), _datasets(recipe, folder), _packages(recipe), _environments(recipe))
    for kind, name, role, source in chain(*loads):
        variables, python = place(role)
        online = {key: value for key, value in variables.items() if key not in OFFLINE_VARIABLES}
        is_offline = is_true(value_of(variables, "HF_HUB_OFFLINE"))
        facts = {"python": python} if kind == NeedKind.PACKAGE else source
        need = Need(kind, name, role, online, python, facts, is_offline=is_offline)
        unique.setdefault(need.identity, need)
    return list(unique.values())


def needs_of_plan(plan: Plan, profile: Profile) -> list[Need]:
    """Return the needs of all phases, each once."""
    needs = [need for phase in plan.phases for need in needs_of(phase.recipe, profile)]
    return list({need.identity: need for need in needs}.values())


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


def _models(recipe: Recipe, folder: Path | None) -> Iterator[Load]:
    roles = roles_of(recipe)
    own = [role for role in roles if role in (Role.INFERENCE, Role.TRAINER, Role.SFT)]
    models = [(recipe.model, role) for role in own]
    models += [(frozen.model, role) for role, frozen in recipe.served_models.items()]
    for model, role in models:
        for kind, name in ((NeedKind.MODEL, model.name), (NeedKind.TOKENIZER, model.tokenizer)):
            if name is not None and is_hub_id(name, folder):
                yield kind, name, role, {}


def _datasets(recipe: Recipe, folder: Path | None) -> Iterator[Load]:
    blocks = [recipe.sft, recipe.warmup.sft if recipe.warmup is not None else None]
    for block in blocks:
        if block is None:
            continue
        sources = block.data if isinstance(block.data, tuple) else (block.data,)
        for source in (*sources, *([block.validation.data] if block.validation is not None else [])):
            if is_hub_id(source.path, folder):
                fields = source.model_dump(mode="json", include={"path", "subset"})
                fields["split"] = source.named_split
                yield NeedKind.DATASET, source.path, Role.SFT, fields


def environments_of(recipe: Recipe) -> tuple[Environment, ...]:
    """Return all environments of a recipe, including those of the evaluation that follows."""
    after = recipe.after.evaluation if recipe.after is not None else None
    return (
        *recipe.environments.train,
        *recipe.environments.eval,
        *(after.environments if after is not None else ()),
    )


def _packages(recipe: Recipe) -> Iterator[Load]:
    """Yield the package of each environment once for each interpreter that loads it."""
    for environment in environments_of(recipe):
        if environment.package is None:
            continue
        for role in (_loader(recipe), *(() if environment.address else (Role.ENV_SERVER,))):
            yield NeedKind.PACKAGE, environment.package, role, {}


def _loader(recipe: Recipe) -> Role:
    """Return the role that loads tasks."""
    return Role.EVALUATOR if recipe.kind == Kind.EVAL else Role.ORCHESTRATOR


def _environments(recipe: Recipe) -> Iterator[Load]:
    loader = _loader(recipe)
    for environment in environments_of(recipe):
        fields = environment.model_dump(mode="json", include={"id", "args", "env_args"})
        yield NeedKind.ENVIRONMENT, environment.id, loader, fields
