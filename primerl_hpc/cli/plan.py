"""``primerl-hpc plan``: show what a recipe would run where."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from primerl_hpc.cli.options import (
    check_custom_code,
    json_option,
    load_both,
    make_epilog,
    no_custom_code_option,
    print_json,
    recipe_and_profile,
    refuse_options,
)
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.log import fold, notice, show_warnings
from primerl_hpc.observe.text import WIDTH, wrap

if TYPE_CHECKING:
    from primerl_hpc.cluster.load import LoadedProfile
    from primerl_hpc.launch.planning.forecast import MeasuredLengths, PlanForecast
    from primerl_hpc.plan.plan import Plan
    from primerl_hpc.recipe.load import LoadedRecipe
    from primerl_hpc.slurm.budget import Budget

EPILOG = make_epilog(
    "plan recipes/reverse_text/tiny.yaml -p local",
    "plan my.yaml -p h100x64 --set max_steps=200 --json",
    "plan my.yaml -p h100x64 --why memory.trainer",
    "plan my.yaml -p h100x64 --nodes 4..32",
    "plan my.yaml -p h100x64 --scripts --steps",
    codes=(ExitCode.NOT_FOUND, ExitCode.OCCUPIED, ExitCode.CONFIG),
)


@click.command("plan", epilog=EPILOG)
@recipe_and_profile
@click.option(
    "--why", "figure", metavar="FIGURE", help="Explain a predicted figure: formula, inputs, source."
)
@click.option("--compare", is_flag=True, help="Show other layouts, and why they lost.")
@click.option(
    "--nodes", "nodes", metavar="A..B", help="Show the best layout and GPU-hours for A, 2A, … B nodes."
)
@click.option("--like", metavar="RUN", help="Take the lengths of rollouts from the metrics of this run.")
@click.option(
    "--scripts", "is_script", is_flag=True, help="Print the batch scripts: run, elastic engines, export."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="With --scripts: write them to this folder instead.",
)
@click.option(
    "--steps", "with_steps", is_flag=True, help="With --scripts: also the srun command of each role."
)
@no_custom_code_option
@json_option
def command(
    recipe: str, profile_name: str | None, overrides: tuple[str, ...], as_json: bool, **shown: Any
) -> None:
    """Show what RECIPE would run where, whether it fits, and how long it takes, without starting anything.

    --scripts shows the batch scripts; with --steps also how the supervisor will start each role: the srun command and
    its variables.
    """
    from primerl_hpc.launch.planning.screen import budget_warning
    from primerl_hpc.launch.preview import (
        budget_json,
        budget_of,
        describe_estimate,
        estimate_start_of,
        preview,
    )
    from primerl_hpc.recipe.custom_code import code_lines, note_custom_code

    if not shown["is_script"]:
        refuse_options({"out", "with_steps"}, "needs --scripts")
    loaded, profile = load_both(recipe, profile_name, overrides)
    check_custom_code(loaded.recipe)
    measured = _measured(shown["like"])
    plan, forecast, warnings = preview(loaded, profile, measured)
    if shown["is_script"]:
        _show_scripts(plan, profile, shown["out"], as_json, with_steps=shown["with_steps"])
        return
    if shown["figure"] is not None:
        _show_figure(forecast, shown["figure"], as_json)
        return
    if shown["compare"] or shown["nodes"] is not None:
        _show_alternatives(loaded, profile, forecast, measured, shown, as_json)
        return
    estimate, budget = estimate_start_of(plan, profile), budget_of(plan, profile)
    if warning := budget_warning(forecast, budget):
        warnings.append(warning)
        notice(f"warning: {warning}")
    if as_json:
        more = {
            "estimate": estimate,
            "budget": budget_json(budget),
            "warnings": warnings,
            "custom_code": code_lines(loaded.recipe),
        }
        print_json({**plan.model_dump(mode="json"), "prediction": forecast.as_json(), **more})
        note_custom_code(loaded.recipe)
        return
    show_plan(plan)
    show_forecast(forecast, budget)
    if estimate is not None:
        click.echo("\n".join(fold(line, WIDTH) for line in describe_estimate(estimate).splitlines()))
    note_custom_code(loaded.recipe)


def _measured(like: str | None) -> MeasuredLengths | None:
    from primerl_hpc.launch.planning.advice import refresh
    from primerl_hpc.launch.planning.forecast import read_lengths
    from primerl_hpc.run.registry import find_run

    if like is None:
        return None
    found = find_run(like)
    refresh(found)
    return read_lengths(found)


def _show_scripts(
    plan: Plan, profile: LoadedProfile, out: Path | None, as_json: bool, *, with_steps: bool
) -> None:
    """Print the batch scripts, or write them. Raises OccupiedError if ``out`` has a different script."""
    from primerl_hpc.common.errors import OccupiedError
    from primerl_hpc.common.files import write_text
    from primerl_hpc.launch.compose import interpreter, make_scripts
    from primerl_hpc.launch.planned_steps import planned_steps
    from primerl_hpc.offline.code.keep import plan_code
    from primerl_hpc.render.lint import warnings_of
    from primerl_hpc.run.rundir import RunDir

    scripts = make_scripts(plan, profile, plan_code(RunDir(Path(plan.run_dir)), plan).root)
    show_warnings(warnings_of(scripts["job.sbatch"]))
    paths = {name: out / name for name in scripts} if out else {}
    for name, path in paths.items():
        if path.exists() and path.read_bytes() != scripts[name].encode():
            raise OccupiedError(
                "a different script already exists", location=str(path), hint="choose another --out"
            )
    for name, path in paths.items():
        write_text(path, scripts[name], mode=0o755)
    steps = planned_steps(plan, profile.profile, interpreter(profile)) if with_steps else []
    if as_json:
        path = paths.get("job.sbatch")
        found = {"script": scripts["job.sbatch"], "path": str(path) if path else None, "scripts": scripts}
        print_json(found | ({"steps": [dataclasses.asdict(step) for step in steps]} if with_steps else {}))
        return
    if paths:
        click.echo("\n".join(map(str, paths.values())))
    elif len(scripts) == 1:
        click.echo(scripts["job.sbatch"], nl=False)
    else:
        click.echo("\n".join(f"==> {name} <==\n{script}" for name, script in scripts.items()), nl=False)
    for step in steps:
        click.echo(f"\n==> {step.title} <==\n{step.text}")


def show_forecast(forecast: PlanForecast, budget: Budget | None = None) -> None:
    """Print the prediction, or in one line why there is none."""
    from primerl_hpc.launch.planning.screen import forecast_lines

    click.echo("\n".join(forecast_lines(forecast, budget)))


def _show_figure(forecast: PlanForecast, name: str, as_json: bool) -> None:
    """Raise NotFoundError for an unknown figure, ConfigError without a prediction."""
    from primerl_hpc.common.errors import ConfigError
    from primerl_hpc.launch.planning.screen import why_lines

    if forecast.prediction is None:
        raise ConfigError(f"no prediction: {forecast.reason}", hint=forecast.hint)
    figure = forecast.prediction.figure(name)
    if as_json:
        print_json(figure.as_dict())
    else:
        click.echo("\n".join(why_lines(figure)))


def _show_alternatives(
    loaded: LoadedRecipe,
    profile: LoadedProfile,
    forecast: PlanForecast,
    measured: MeasuredLengths | None,
    shown: dict[str, Any],
    as_json: bool,
) -> None:
    from primerl_hpc.launch.planning.alternatives import compare_layouts, parse_nodes, scaling
    from primerl_hpc.launch.planning.screen import compare_lines, scaling_lines

    recipe = loaded.recipe
    if shown["nodes"] is not None:
        rows = scaling(recipe, profile.profile, parse_nodes(shown["nodes"]), measured)
        if as_json:
            print_json([row.as_json() for row in rows])
        else:
            click.echo("\n".join(scaling_lines(rows)))
        return
    found, alternatives = compare_layouts(recipe, profile.profile, forecast, measured)
    if as_json:
        lost = dict(found.pruned)
        rows_of = [item.as_json() for item in alternatives]
        print_json({"layouts": rows_of, "num_layouts": found.num_layouts, "pruned": lost})
        return
    click.echo("\n".join(compare_lines(alternatives) if alternatives else wrap(found.reason, "  ")))
    pruned = ", ".join(f"{number} lost by {reason}" for reason, number in found.pruned.most_common())
    counts = f"{found.num_layouts} layouts" + (f", {pruned}" if pruned else "")
    click.echo("\n".join(wrap(counts, "  ")))


def show_plan(plan: Plan) -> None:
    """Print nodes, phases and processes of a plan, and the choices that the planner made."""
    from primerl_hpc.launch.planning.plan_lines import plan_lines

    click.echo("\n".join(plan_lines(plan)))
