"""``primerl-hpc plan``"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from primerl_hpc.cli.options import json_option, load_both, print_json, recipe_and_profile

if TYPE_CHECKING:
    from primerl_hpc.plan.types import Plan


@click.command("plan", epilog="Example:  primerl-hpc plan recipes/reverse_text/tiny.yaml -p local")
@recipe_and_profile
@json_option
def command(recipe: str, profile_name: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show what RECIPE would run where, without starting anything."""
    from primerl_hpc.common import env
    from primerl_hpc.launch.prepare import compile_for

    loaded, profile = load_both(recipe, profile_name, overrides)
    plan = compile_for(loaded, profile, (env.runs_dir() / loaded.recipe.name).resolve())
    if as_json:
        print_json(plan.model_dump(mode="json"))
    else:
        show_plan(plan)


def show_plan(plan: Plan) -> None:
    kind = "GPUs" if plan.accelerator == "gpu" else "CPU slots"
    click.echo(f"{plan.name}: {plan.kind.value} on profile {plan.profile_name} ({plan.scheduler})")
    click.echo(f"  {len(plan.nodes)} node(s) of {plan.accelerators_per_node} {kind}\n")
    for phase in plan.phases:
        recipe = phase.recipe
        steps = f"{recipe.max_steps} steps, " if recipe.max_steps else ""
        click.echo(f"phase {phase.name}: {recipe.kind.value}, {steps}model {phase.model_path}")
        for process in phase.processes:
            nodes = ",".join(map(str, process.nodes))
            taken = ",".join(map(str, process.accelerators)) or "-"
            click.echo(f"  {process.name:<16} node {nodes:<8} {kind} {taken:<17} {process.on_exit.value}")
        click.echo()
    for note in plan.notes:
        click.echo(f"chosen for you: {note}")
