"""``primerl-hpc schema``: print a JSON schema."""

from __future__ import annotations

import click

from primerl_hpc.cli.options import json_option, make_epilog, print_json


@click.command("schema", epilog=make_epilog("schema recipe > recipe.schema.json"))
@click.argument("what", type=click.Choice(["recipe", "profile"]))
@json_option
def command(what: str, as_json: bool) -> None:
    """Print the JSON schema of recipes or profiles, for completion and validation in an editor.

    The output is JSON with and without --json.
    """
    from primerl_hpc.cluster.schema import Profile
    from primerl_hpc.recipe.explain import json_schema
    from primerl_hpc.recipe.schema.recipe import Recipe

    print_json(json_schema(Recipe if what == "recipe" else Profile))
