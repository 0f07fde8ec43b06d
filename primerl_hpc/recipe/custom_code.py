"""Find code that a run executes because its recipe names it, and that is not part of primerl-hpc or its dependencies.

    for code in custom_code(recipe):
        print(code.key, code.what)        # loss.import_path    my_losses:clipped

Such code is: packages of environments, harnesses and judges, import paths, modeling code of a model, and folders in
import paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.log import notice
from primerl_hpc.common.safety.printable import one_line
from primerl_hpc.recipe.schema.model import Model, Renderer
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.rollout import Environment

SHIPPED_ENVIRONMENTS = frozenset(
    {
        "reverse-text",
        "alphabet-sort",
        "calculator",
        "color-squares",
        "local-search",
        "math-problems",
        "nim",
        "multiple-choice",
        "synthetic-rollouts",
    }
)
"""Ids of environments that are part of this package."""
VERIFIERS_PLUGINS = frozenset(
    {"harbor", "nemo-gym", "openenv", "textarena"}  # tasksets
    | {"agentic-judge", "best-of-n", "isolated-verifier", "shared-agentic-judge", "single-agent", "user-sim"}
    | {"null", "bash", "browser-use", "claude-code", "codex", "hermes-agent", "kimi-code", "mini-swe-agent"}
    | {
        "openclaw",
        "pi",
        "prime-agent",
        "rlm",
        "terminus-2",
        "inproc-chat",
    }  # harnesses; the last one is part of this package
    | {"reference", "rubric", "decision"}  # judges
)
"""Ids of plugins that are part of verifiers."""
IMPORT_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "LD_PRELOAD", "LD_LIBRARY_PATH")
ENGINE_OPTIONS = frozenset(
    {"trust-remote-code", "logits-processors", "worker-cls", "scheduler-cls", "tool-parser-plugin"}
    | {"reasoning-parser-plugin", "io-processor-plugin"}
)
"""Options of vLLM (``inference.extra_args``) whose values name modules, or that let a model bring code."""
_PACKAGE = "the package "


@dataclass(frozen=True)
class CustomCode:
    """A piece of code that the recipe names."""

    key: str
    """Key in the recipe, for example ``environments.train.0.id``."""
    what: str
    """Import path, package or model."""
    modules: tuple[str, ...] = ()
    """Modules with the code, if they are known by name."""
    is_package: bool = False
    """True for a package of an environment, harness or judge; its module has the same name."""


def custom_code(recipe: Recipe) -> list[CustomCode]:
    """Return the custom code of a recipe in the order of its keys, each key once."""
    found = [
        CustomCode(".".join(map(str, path)), what, _modules(path[-1], what), what.startswith(_PACKAGE))
        for path, what in _in_block(recipe, ())
    ]
    return list(dict.fromkeys(found))


def _modules(key: Any, what: str) -> tuple[str, ...]:
    """Return the modules of ``what``: those of a package, an import path, or the values of an option of vLLM."""
    if what.startswith(_PACKAGE):
        return (_normalize(what.removeprefix(_PACKAGE)).replace("-", "_"),)
    if key == "import_path" or str(key).lstrip("-").replace("_", "-") in ENGINE_OPTIONS - {
        "trust-remote-code"
    }:
        return tuple(dict.fromkeys(re.findall(r"(?<![\w./])([A-Za-z_]\w*)(?=[.:]\w)", what)))
    return ()


def code_lines(recipe: Recipe) -> list[str]:
    """Return a line such as ``loss.import_path: my_losses:clipped`` for each piece of custom code."""
    return [one_line(f"{code.key}: {code.what}") for code in custom_code(recipe)]


def note_custom_code(recipe: Recipe) -> None:
    """Print the custom code that the run executes to stderr."""
    for line in code_lines(recipe):
        notice(f"note: the run executes code that the recipe names: {line}")


def refuse_custom_code(recipe: Recipe) -> None:
    """Raise ConfigError if the recipe names custom code."""
    if code := custom_code(recipe):
        more = f", and {len(code) - 1} more" if len(code) > 1 else ""
        raise ConfigError(
            f"the run would execute {code[0].what}{more}, but --no-custom-code was given",
            location=code[0].key,
            hint="remove it from the recipe, or leave out --no-custom-code",
        )


def _in_block(block: BaseModel, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    if isinstance(block, Environment):
        yield from _in_environment(block, path)
    if isinstance(block, Model) and block.trust_remote_code:
        yield (*path, "trust_remote_code"), f"the modeling code of {block.name}"
    if isinstance(block, Renderer) and "import_path" in block.options:
        yield (*path, "options", "import_path"), str(block.options["import_path"])
    for name in type(block).model_fields:
        value, location = getattr(block, name), (*path, name)
        if name == "import_path" and value:
            yield location, str(value)
        elif name == "extra_args" and isinstance(value, dict):
            for option, setting in value.items():
                if option.lstrip("-").replace("_", "-").partition(".")[0] in ENGINE_OPTIONS and setting:
                    yield (*location, option), f"{option} {setting}"
        elif name.startswith("env") and isinstance(value, dict):
            yield from _in_variables(value, location)
        elif isinstance(value, BaseModel):
            yield from _in_block(value, location)
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from _in_block(item, (*location, index))


def _in_variables(values: dict[str, Any], path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield variables that change what is imported, such as ``env: {PYTHONPATH: …}``, also those by role."""
    for name, value in values.items():
        if name in IMPORT_VARIABLES:
            yield (*path, name), f"modules of {value}"
        elif isinstance(value, dict):
            yield from _in_variables(value, (*path, name))


def _in_environment(environment: Environment, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    if (
        environment.address is None
        and _normalize(environment.id) not in SHIPPED_ENVIRONMENTS | VERIFIERS_PLUGINS
    ):
        yield (*path, "id"), f"{_PACKAGE}{environment.id}"
    for name in ("args", "env_args"):
        yield from _in_plugins(getattr(environment, name), (*path, name))


def _in_plugins(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield harnesses, judges and environment classes: mappings with an ``id``, at any depth of the arguments."""
    if isinstance(value, dict):
        name = value.get("id")
        if (
            isinstance(name, str)
            and name
            and _normalize(name) not in SHIPPED_ENVIRONMENTS | VERIFIERS_PLUGINS
        ):
            yield (*path, "id"), f"{_PACKAGE}{name}"
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _in_plugins(item, (*path, key))


def _normalize(identifier: str) -> str:
    """Normalize an id as verifiers does: ``owner/reverse_text@1.0`` names the same module as ``reverse-text``."""
    return identifier.rsplit("/", 1)[-1].split("@", 1)[0].replace("_", "-").lower()
