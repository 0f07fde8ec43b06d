"""Reads a recipe: ``base:`` recipes, the file itself, the environment, ``--set``; later ones win.

loaded = load_recipe("recipes/reverse_text/tiny.yaml", overrides=["max_steps=5"])
loaded.recipe.max_steps, loaded.document.origins["max_steps"]         # 5, '--set'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.assets import find_asset
from primerl_hpc.common.errors import ConfigError, NotFoundError
from primerl_hpc.common.validate import blocks_at, from_variable, is_text, tag_of, validate
from primerl_hpc.common.yamldoc import Document, from_override, load_yaml, with_dots
from primerl_hpc.recipe.schema import Recipe


@dataclass(frozen=True)
class LoadedRecipe:
    recipe: Recipe
    document: Document
    path: Path


def load_recipe(
    name: str, *, overrides: list[str] | None = None, environ: dict[str, str] | None = None
) -> LoadedRecipe:
    """``name`` is a path, or the name of a shipped or own recipe (``reverse_text/tiny``).

    Raises NotFoundError, ConfigError.
    """
    path = resolve_recipe_path(name)
    document = _load_with_bases(path, ())
    variables = env.recipe_overrides(environ)
    document = _changed(
        document, [(from_variable(Recipe, key), value, name) for name, key, value in variables]
    )
    document = with_overrides(document, overrides or [])
    return LoadedRecipe(validate(Recipe, document), document, path)


def with_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """A recipe's document with ``--set key=value`` laid over it; ``a.0.b`` and ``a[0].b`` name an item of a list.

    Raises ConfigError.
    """
    changes = []
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"--set {text!r} is not of the form key=value")
        changes.append((with_dots(key), value, "--set"))
    return _changed(document, changes)


def _changed(document: Document, changes: list[tuple[str, str, str]]) -> Document:
    """With ``changes`` (key, value, origin) in one layer: in which order a block's type and its keys stand is the same."""
    layer = Document()
    for key, value, origin in changes:
        layer = layer.overlay(from_override(key, value, origin, is_text=is_text(Recipe, key)))
    return document.overlay(layer, _is_another_type)


def _is_another_type(path: tuple[str, ...], low: dict[str, Any], high: dict[str, Any]) -> bool:
    """Of a block told apart by its ``type`` (loss, optimizer): one of another type would not know the keys below it."""
    types = [tag_of(each) for each in blocks_at(Recipe, path)]
    return len(types) > 1 and "type" in high and high["type"] != low.get("type", types[0])


def resolve_recipe_path(name: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    try:
        return find_asset("recipes", name.removeprefix("recipes/"))
    except NotFoundError as error:
        raise NotFoundError(f"no recipe '{name}' here", mend=error.mend) from None


def _load_with_bases(path: Path, seen: tuple[Path, ...]) -> Document:
    """``base:`` is one name or a list, relative to the file that names it, laid under it left to right."""
    if path.resolve() in seen:
        chain = " → ".join(str(each) for each in (*seen, path.resolve()))
        raise ConfigError(f"recipes are their own base: {chain}", place=str(path))
    document = load_yaml(path)
    bases = document.values.pop("base", None) or []
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(
            "base: must be a file name or a list of them", place=document.origins.get("base", str(path))
        )
    merged = Document()
    for base in bases:
        beside = path.parent / base
        try:
            found = beside if beside.is_file() else resolve_recipe_path(base)
        except NotFoundError:
            raise NotFoundError(
                f"base '{base}' does not exist",
                place=document.origins.get("base", str(path)),
                mend=f"it is looked for beside {path.name} and among the shipped recipes",
            ) from None
        merged = merged.overlay(_load_with_bases(found, (*seen, path.resolve())), _is_another_type)
    return merged.overlay(document, _is_another_type)
