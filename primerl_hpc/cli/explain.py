"""``primerl-hpc explain``: explain a key of a recipe or profile."""

from __future__ import annotations

from typing import Any

import click

from primerl_hpc.cli.options import json_option, make_epilog, print_json, refuse_options, set_option
from primerl_hpc.cli.values import KEY
from primerl_hpc.common.document import dump_flow, dump_yaml
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.log import hang, show_warnings

EPILOG = make_epilog(
    "explain",
    "explain rollouts.max_off_policy_steps --recipe my.yaml",
    "explain scheduler.time --of profile",
    "explain --schema > recipe.schema.json",
    codes=(ExitCode.NOT_FOUND, ExitCode.CONFIG),
)


@click.command("explain", epilog=EPILOG)
@click.argument("key", type=KEY, required=False)
@click.option("--recipe", help="Also show the value in this recipe, and its origin.")
@click.option(
    "--of",
    "what",
    type=click.Choice(["recipe", "profile"]),
    default="recipe",
    show_default=True,
    help="Select the file format.",
)
@click.option("--schema", "is_schema", is_flag=True, help="Print the JSON schema of all keys, for editors.")
@set_option
@json_option
def command(
    key: str | None, recipe: str | None, what: str, is_schema: bool, overrides: tuple[str, ...], as_json: bool
) -> None:
    """Explain KEY: type, default, meaning and origin. Without KEY, list all keys.

    Levels of a key are separated by dots: optimizer.lr.
    """
    from primerl_hpc.cluster.schema import Profile
    from primerl_hpc.recipe.explain import explain, explain_all, json_schema
    from primerl_hpc.recipe.load import load_recipe
    from primerl_hpc.recipe.schema.recipe import Recipe

    if recipe is not None and what == "profile":
        raise click.UsageError(
            "--recipe shows values of a recipe, but --of profile selects keys of a profile; remove one"
        )
    if recipe is not None and key is None:
        raise click.UsageError("--recipe shows the value of one key; name the key")
    if overrides and recipe is None:
        raise click.UsageError("--set needs --recipe, whose values it changes")
    root = Recipe if what == "recipe" else Profile
    if is_schema:
        refuse_options({"key", "recipe"}, "does not apply to --schema")
        print_json(json_schema(root))
        return
    if key is None:
        entries = explain_all(root)
        if as_json:
            print_json(entries)
            return
        for entry in entries:
            click.echo(f"{entry['key']:<42} {entry['type']}")
        return
    loaded = load_recipe(recipe, overrides=list(overrides)) if recipe else None
    show_warnings(loaded.warnings if loaded else ())
    entry = explain(root, key, loaded)
    if as_json:
        print_json(entry)
        return
    click.echo(entry["key"])
    if isinstance(entry["default"], dict):
        del entry["keys"]  # the default names them
    for name in ("type", "meaning", "default", "keys", "value", "origin"):
        if entry.get(name, "") != "":
            click.echo(f"  {name + ':':<9} {hang(_text(entry[name]), 12)}")


def _text(value: Any) -> str:
    """Return a value as a recipe would have it: a block as lines of YAML. Prose is shown without markup."""
    if isinstance(value, str):
        return value.replace("``", "`")
    return dump_yaml(value).rstrip() if value and isinstance(value, dict) else dump_flow(value)
