"""Load a recipe: environment variables, ``base:`` recipes, the file itself, ``--set``. Later layers take precedence.

    loaded = load_recipe("recipes/reverse_text/tiny.yaml", overrides=["max_steps=5"])
    loaded.recipe.max_steps, loaded.document.origins["max_steps"]         # 5, '--set'

Build a recipe with `validate_recipe` (from a document, with file and line in errors) or `parse_recipe` (from plain
values): `Recipe.model_validate` alone does not run the checks across blocks. `plan.plan.load_plan` runs them too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.assets import find_asset
from primerl_hpc.common.document import Document, from_override, load_yaml, with_dots
from primerl_hpc.common.errors import ConfigError, NotFoundError
from primerl_hpc.common.safety.odd_text import check_path_text
from primerl_hpc.common.validate import Change, blocks_at, is_text, split_variables, tag_of, validate
from primerl_hpc.recipe.schema.cross_checks import check_recipe
from primerl_hpc.recipe.schema.recipe import Recipe


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe with its origin."""

    recipe: Recipe
    document: Document
    """The merged YAML values, with the file and line (or override) of each key."""
    path: Path
    warnings: tuple[str, ...] = ()
    """About variables that a file overrides."""


def load_recipe(
    name: str, *, overrides: list[str] | None = None, environ: dict[str, str] | None = None
) -> LoadedRecipe:
    """Load and validate the recipe ``name``: a path, or the name of a shipped or own recipe (``reverse_text/tiny``).

    ``overrides``: ``key=value`` texts of ``--set``. ``environ``: variables with ``PRIMERL_*`` values of keys that no
    file sets (default: this process's environment). Raises NotFoundError, ConfigError.
    """
    check_path_text(name, "recipe")
    path = resolve_recipe_path(name)
    document = _load_with_bases(path, ())
    changes, warnings = split_variables(Recipe, document, env.recipe_overrides(environ))
    document = with_overrides(_overlay(document, changes), overrides or [])
    return LoadedRecipe(validate_recipe(document), document, path, warnings)


def validate_recipe(document: Document) -> Recipe:
    """Return the recipe that ``document`` describes.

    Raises ConfigError, with file and line, for the first fault of a block, or else the first failed cross check.
    """
    recipe = validate(Recipe, document)
    try:
        check_recipe(recipe)
    except ValueError as error:
        raise ConfigError(str(error), location=document.location(())) from None
    return recipe


def parse_recipe(values: Mapping[str, Any]) -> Recipe:
    """Return the recipe that ``values``, a mapping as in YAML, describe. Raises ValueError if they are not valid."""
    recipe = Recipe.model_validate(values)
    check_recipe(recipe)
    return recipe


def with_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """Return ``document`` with the ``key=value`` texts of ``--set`` on top; ``a.0.b`` and ``a[0].b`` name a list item.

    Raises ConfigError.
    """
    changes = []
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"--set {text!r} does not have the form key=value")
        changes.append((with_dots(key), value, "--set"))
    return _overlay(document, changes)


def _overlay(document: Document, changes: list[Change]) -> Document:
    """Return ``document`` with ``changes`` (key, value, origin) on top.

    All changes form one layer, so that the order of a block's ``type`` and its other keys does not matter.
    """
    layer = Document()
    for key, value, origin in changes:
        layer = layer.overlay(from_override(key, value, origin, is_text=is_text(Recipe, key)))
    return document.overlay(layer, _is_another_type)


def _is_another_type(path: tuple[str, ...], low: dict[str, Any], high: dict[str, Any]) -> bool:
    """True if the block of the upper layer has another ``type`` (loss, optimizer) than the one below it.

    It then replaces the lower block, whose keys it does not have.
    """
    types = [tag_of(block) for block in blocks_at(Recipe, path)]
    return len(types) > 1 and "type" in high and high["type"] != low.get("type", types[0])


def resolve_recipe_path(name: str) -> Path:
    """Return the file of a recipe, given by path or name. Raises NotFoundError."""
    path = Path(name)
    if path.is_file():
        return path
    try:
        return find_asset("recipes", name.removeprefix("recipes/"))
    except NotFoundError as error:
        if path.suffix in (".yaml", ".yml") and error.hint.startswith("known:"):
            raise NotFoundError(
                f"there is no file {path.absolute()}",
                hint="give the path of a recipe, or the name of a shipped one, such as reverse_text/tiny",
            ) from None
        raise NotFoundError(f"there is no recipe '{name}'", hint=error.hint) from None


def _load_with_bases(path: Path, seen: tuple[Path, ...]) -> Document:
    """Load a recipe file on top of the recipes that its key ``base`` names, from left to right.

    ``base`` is a name or a list of names, relative to the file. ``seen``: the files whose bases are being loaded.
    """
    if path.resolve() in seen:
        chain = " → ".join(str(file) for file in (*seen, path.resolve()))
        raise ConfigError(f"recipes must not be their own base: {chain}", location=str(path))
    document = load_yaml(path)
    if "scheduler" in document.values and "kind" not in document.values:
        raise ConfigError(
            "this is a cluster profile, not a recipe", location=str(path), hint="give it with -p"
        )
    bases = document.values.pop("base", None) or []
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(
            "base: must be a file name or a list of file names",
            location=document.origins.get("base", str(path)),
        )
    merged = Document()
    for base in bases:
        relative = path.parent / base
        try:
            found = relative if relative.is_file() else resolve_recipe_path(base)
        except NotFoundError:
            raise NotFoundError(
                f"base '{base}' does not exist",
                location=document.origins.get("base", str(path)),
                hint=f"it must be a file relative to the folder of {path.name}, or a shipped recipe",
            ) from None
        merged = merged.overlay(_load_with_bases(found, (*seen, path.resolve())), _is_another_type)
    return merged.overlay(document, _is_another_type)
