"""Check that environments with tools have a renderer that renders tools and parses tool calls.

    refuse_tools_without_renderer(environment, config, model, renderer)   # in a role, with the renderer
    check_tools(recipe)                                                   # before submission, without a tokenizer

With another renderer every rollout fails at its first turn, or a teacher's tool calls are missing from the training
data.
"""

from __future__ import annotations

import importlib.util
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import Kind
from primerl_hpc.envs import expose_shipped
from primerl_hpc.envs.lookup import module_of
from primerl_hpc.envs.tasks import resolve_environment
from primerl_hpc.recipe.schema.model import Model
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.rollout import Environment

if TYPE_CHECKING:
    from verifiers.v1.mcp import Toolset

WITHOUT_TOOLS = frozenset({"chatml"})
"""Our renderers without tool support. All renderers of package ``renderers`` support tools."""


def shared_toolsets(config: Any) -> list[Toolset]:
    """Return the tool servers that all episodes of a server share. ``config``: verifiers' EnvConfig."""
    import verifiers.v1 as vf

    taskset = vf.load_taskset(config.taskset)
    return list(taskset.toolsets(config.taskset))


def toolsets_of_each_episode(config: Any) -> list[Toolset]:
    """Return the tool servers that verifiers starts for each episode."""
    import verifiers.v1 as vf

    task_class = type(vf.load_taskset(config.taskset)).task_type()
    return list(task_class.toolsets(config.taskset.task))


def has_tools(config: Any) -> bool:
    return bool(shared_toolsets(config) or toolsets_of_each_episode(config))


def refuse_tools_without_renderer(
    environment: Environment, config: Any, model: Model, renderer: Any | None = None
) -> None:
    """Raise ConfigError if the environment has tools and the renderer does not support them.

    ``renderer``: None if no tokenizer is available; the renderer's name and options are then used instead.
    """
    supports_tools = (
        _class_supports_tools(model) if renderer is None else getattr(renderer, "supports_tools", True)
    )
    if not supports_tools and has_tools(config):
        raise ConfigError(
            f"the environment has tools, but renderer '{model.renderer.name}' of model {model.name} does not support "
            "them, so every rollout would fail",
            location=f"environment {environment.label}",
            hint="set model.renderer.name to a renderer with tools (qwen3, llama-3, …); for renderer default, set "
            "options: {tool_parser: …}",
        )


def check_tools(recipe: Recipe) -> None:
    """Call `refuse_tools_without_renderer` for all environments that this interpreter can load, before submission.

    An environment that cannot be loaded here is checked by its server, which fails with the same message. Only packages
    that mention tool servers are imported, because importing verifiers takes seconds.
    """
    environments = _rendered_environments(recipe)
    if (
        not environments
        or importlib.util.find_spec("verifiers") is None
        or _class_supports_tools(recipe.model)
    ):
        return
    for environment in environments:
        if not package_mentions(environment, "toolsets"):  # the method that declares tool servers
            continue
        try:
            config = resolve_environment(environment)
            needs_renderer = has_tools(config)
        except Exception:  # noqa: BLE001 (any error in a package's own code; the environment server reports it)
            continue
        if needs_renderer:
            refuse_tools_without_renderer(environment, config, recipe.model)


def _rendered_environments(recipe: Recipe) -> list[Environment]:
    """Return the environments whose messages are tokenized by the recipe's renderer."""
    if recipe.kind == Kind.RL:
        return [*recipe.environments.train, *recipe.environments.eval]
    return list(recipe.environments.eval) if recipe.kind == Kind.EVAL and not recipe.is_external else []


def _class_supports_tools(model: Model) -> bool:
    """False if the name and the options of the renderer show that it does not support tools."""
    if model.renderer.name == "default":
        return model.renderer.options.get("tool_parser") is not None
    return model.renderer.name not in WITHOUT_TOOLS


def package_mentions(environment: Environment, word: str) -> bool:
    """True if a source file of the environment's package contains ``word``. Does not import the package."""
    expose_shipped()
    module = module_of(environment.id)
    own = importlib.util.find_spec("verifiers")
    # looked up in the folder: find_spec of a submodule would import verifiers, which takes seconds
    folders = [
        str(Path(folder, "v1", "tasksets")) for folder in (own and own.submodule_search_locations) or ()
    ]
    try:
        spec = PathFinder.find_spec(module, folders) or importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None:
        return False
    folder = Path(spec.origin).parent
    files = folder.rglob("*.py") if spec.submodule_search_locations else [Path(spec.origin)]
    try:
        return any(word in path.read_text(errors="replace") for path in files)
    except OSError:  # not a file, for example a builtin module
        return False
