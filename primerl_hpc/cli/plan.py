"""``primerl-hpc plan``"""

from __future__ import annotations

import dataclasses
import shutil
from typing import TYPE_CHECKING, Any

import click

from primerl_hpc.cli.options import json_option, load_both, print_json, recipe_and_profile

if TYPE_CHECKING:
    from primerl_hpc.plan.types import Plan

ESTIMATE_TIMEOUT_S = 5.0


@click.command("plan", epilog="Example:  primerl-hpc plan recipes/reverse_text/tiny.yaml -p local")
@recipe_and_profile
@json_option
def command(recipe: str, profile_name: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show what RECIPE would run where, without starting anything."""
    from primerl_hpc.launch.prepare import preview

    loaded, profile = load_both(recipe, profile_name, overrides)
    plan = preview(loaded, profile)
    estimate = _estimate(plan, profile)
    if as_json:
        print_json({**plan.model_dump(mode="json"), "estimate": estimate})
        return
    show_plan(plan)
    if estimate is not None:
        click.echo(_in_words(estimate))


def _estimate(plan: Plan, profile: Any) -> dict[str, Any] | None:
    """When SLURM would start it, or why it would refuse; None where SLURM is not here or does not say in time."""
    from primerl_hpc.common.errors import SchedulerError
    from primerl_hpc.common.sbatch import UnansweredError
    from primerl_hpc.launch.estimate import estimate_start
    from primerl_hpc.launch.prepare import make_script

    if plan.scheduler != "slurm" or shutil.which("sbatch") is None:
        return None
    try:
        return dataclasses.asdict(estimate_start(make_script(plan, profile), timeout_s=ESTIMATE_TIMEOUT_S))
    except UnansweredError:
        return None
    except SchedulerError as error:
        return {"refused": error.cause, "mend": error.mend}


def _in_words(estimate: dict[str, Any]) -> str:
    if "refused" in estimate:
        return f"{estimate['refused']}; {estimate['mend']}" if estimate["mend"] else estimate["refused"]
    return (
        f"could start {estimate['start'].replace('T', ' ')} on {estimate['nodes']} of {estimate['partition']}"
    )


def _nodes_in_words(plan: Plan, kind: str) -> str:
    cpu = sum(node.is_cpu for node in plan.nodes)
    words = [f"{len(plan.nodes) - cpu} node(s) of {plan.accelerators_per_node} {kind}"]
    words += [f"{cpu} of the CPU partition"] if cpu else []
    words += [f"{plan.spare_nodes} spare"] if plan.spare_nodes else []
    words += [f"{plan.num_elastic} job(s) of one engine"] if plan.num_elastic else []
    return " + ".join(words)


def show_plan(plan: Plan) -> None:
    kind = "GPUs" if plan.accelerator == "gpu" else "CPU slots"
    click.echo(f"{plan.name}: {plan.kind.value} on profile {plan.profile_name} ({plan.scheduler})")
    click.echo(f"  {_nodes_in_words(plan, kind)}\n")
    for phase in plan.phases:
        recipe = phase.recipe
        steps = f"{recipe.max_steps} steps, " if recipe.max_steps else ""
        click.echo(f"phase {phase.name}: {recipe.kind.value}, {steps}model {phase.model_path}")
        for process in (*phase.processes, *phase.elastic):
            where = "own job" if process in phase.elastic else f"node {','.join(map(str, process.nodes))}"
            taken = ",".join(map(str, process.accelerators)) or "-"
            click.echo(f"  {process.name:<16} {where:<13} {kind} {taken:<17} {process.on_exit.value}")
        click.echo()
    for note in plan.notes:
        click.echo(f"chosen for you: {note}")
