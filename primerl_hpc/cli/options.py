"""Options that several commands share, spelled once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError

profile_option = click.option(
    "--profile", "-p", "profile_name", help="Cluster profile: a name or a file. [env: PRIMERL_PROFILE]"
)
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the recipe; repeatable."
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document and nothing else."
)
run_argument = click.argument("run", required=False)


def recipe_and_profile(function: Callable[..., Any]) -> Callable[..., Any]:
    """``RECIPE --profile P --set k=v``"""
    return click.argument("recipe")(profile_option(set_option(function)))


def load_both(recipe: str, profile_name: str | None, overrides: tuple[str, ...]) -> tuple[Any, Any]:
    """The loaded recipe and profile. Raises ConfigError, NotFoundError."""
    from primerl_hpc.cluster.load import load_profile
    from primerl_hpc.recipe.load import load_recipe

    name = profile_name or env.default_profile()
    if name is None:
        from primerl_hpc.common.assets import list_assets

        known = ", ".join(each.removesuffix(".yaml") for each in list_assets("cluster_profiles"))
        raise ConfigError("no cluster profile was given", mend=f"use --profile with one of: {known}")
    return load_recipe(recipe, overrides=list(overrides)), load_profile(name)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, ensure_ascii=False))
