"""``primerl-hpc explain``"""

from __future__ import annotations

import click

from primerl_hpc.cli.options import json_option, print_json, set_option


@click.command(
    "explain", epilog="Example:  primerl-hpc explain rollouts.max_off_policy_steps --recipe my.yaml"
)
@click.argument("key", required=False)
@click.option("--recipe", help="Also show the value this recipe has, and where it comes from.")
@click.option("--of", "what", type=click.Choice(["recipe", "profile"]), default="recipe", show_default=True)
@set_option
@json_option
def command(
    key: str | None, recipe: str | None, what: str, overrides: tuple[str, ...], as_json: bool
) -> None:
    """Type, default, meaning and origin of KEY (dots between levels); without KEY: all keys."""
    from primerl_hpc.cluster.schema import Profile
    from primerl_hpc.recipe.explain import explain, explain_all
    from primerl_hpc.recipe.load import load_recipe
    from primerl_hpc.recipe.schema import Recipe

    if recipe is not None and what == "profile":
        raise click.UsageError(
            "--recipe shows values of a recipe, and --of profile asks for keys of a profile"
        )
    if recipe is not None and key is None:
        raise click.UsageError("--recipe shows the value of one key: which?")
    if overrides and recipe is None:
        raise click.UsageError("--set changes what --recipe shows, which is missing")
    root = Recipe if what == "recipe" else Profile
    if key is None:
        entries = explain_all(root)
        if as_json:
            print_json(entries)
            return
        for entry in entries:
            click.echo(f"{entry['key']:<42} {entry['type']}")
        return
    loaded = load_recipe(recipe, overrides=list(overrides)) if recipe else None
    entry = explain(root, key, loaded)
    if as_json:
        print_json(entry)
        return
    click.echo(entry["key"])
    for name in ("type", "default", "meaning", "value", "origin", "keys"):
        if entry.get(name) not in (None, ""):
            text = str(entry[name]).replace("\n", f"\n{'':<12}")
            click.echo(f"  {name + ':':<9} {text}")
