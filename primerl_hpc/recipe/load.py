"""Reads a recipe: ``base:`` recipes, the file itself, the environment, ``--set``; later ones win.

loaded = load_recipe("recipes/reverse_text/tiny.yaml", overrides=["max_steps=5"])
loaded.recipe.max_steps, loaded.document.origins["max_steps"]         # 5, '--set'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from primerl_hpc.common import env
from primerl_hpc.common.assets import find_asset
from primerl_hpc.common.errors import ConfigError, NotFoundError
from primerl_hpc.common.validate import is_text, validate
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
    for key, value in env.recipe_overrides(environ).items():
        origin = f"PRIMERL_{key.upper().replace('.', '__')}"
        document = document.overlay(from_override(key, value, origin, is_text=is_text(Recipe, key)))
    document = with_overrides(document, overrides or [])
    return LoadedRecipe(validate(Recipe, document), document, path)


def with_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """A recipe's document with ``--set key=value`` laid over it; ``a.0.b`` and ``a[0].b`` name an item of a list.

    Raises ConfigError.
    """
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"--set {text!r} is not of the form key=value")
        key = with_dots(key)
        document = document.overlay(from_override(key, value, "--set", is_text=is_text(Recipe, key)))
    return document


def resolve_recipe_path(name: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    try:
        return find_asset("recipes", name.removeprefix("recipes/") if path.suffix else f"{name}.yaml")
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
        merged = merged.overlay(_load_with_bases(found, (*seen, path.resolve())))
    return merged.overlay(document)
