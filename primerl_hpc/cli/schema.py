"""``primerl-hpc schema``"""

from __future__ import annotations

import click

from primerl_hpc.cli.options import json_option, print_json


@click.command("schema", epilog="Example:  primerl-hpc schema recipe > recipe.schema.json")
@click.argument("what", type=click.Choice(["recipe", "profile"]))
@json_option
def command(what: str, as_json: bool) -> None:
    """JSON schema of recipes or profiles, for completion and checks in an editor; --json says the same."""
    from primerl_hpc.cluster.schema import Profile
    from primerl_hpc.recipe.explain import json_schema
    from primerl_hpc.recipe.schema import Recipe

    print_json(json_schema(Recipe if what == "recipe" else Profile))
