"""``primerl-hpc render``: write the batch scripts of a recipe."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from primerl_hpc.cli.options import json_option, load_both, make_epilog, print_json, recipe_and_profile
from primerl_hpc.cli.plan import preview_with_warnings
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.log import show_warnings

EPILOG = make_epilog(
    "render my.yaml -p h100x64 --steps",
    codes=(ExitCode.NOT_FOUND, ExitCode.OCCUPIED, ExitCode.CONFIG),
)


@click.command("render", epilog=EPILOG)
@recipe_and_profile
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the scripts to this folder. [default: print them]",
)
@click.option(
    "--steps", "with_steps", is_flag=True, help="Also show the srun command and variables of each role."
)
@json_option
def command(
    recipe: str,
    profile_name: str | None,
    overrides: tuple[str, ...],
    out: Path | None,
    with_steps: bool,
    as_json: bool,
) -> None:
    """Write the batch scripts of RECIPE: those of the run, its elastic engines and its export.

    With --steps, also print how the supervisor will start each role: the srun command and its variables.
    """
    from primerl_hpc.common.errors import OccupiedError
    from primerl_hpc.common.files import write_text
    from primerl_hpc.launch.code.keep import plan_code
    from primerl_hpc.launch.compose import interpreter, make_scripts
    from primerl_hpc.launch.planned_steps import planned_steps
    from primerl_hpc.render.lint import warnings_of
    from primerl_hpc.run.rundir import RunDir

    loaded, profile = load_both(recipe, profile_name, overrides)
    plan, _, _ = preview_with_warnings(loaded, profile)
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
        print_json(found | ({"steps": [asdict(step) for step in steps]} if with_steps else {}))
        return
    if paths:
        click.echo("\n".join(map(str, paths.values())))
    elif len(scripts) == 1:
        click.echo(scripts["job.sbatch"], nl=False)
    else:
        click.echo("\n".join(f"==> {name} <==\n{script}" for name, script in scripts.items()), nl=False)
    for step in steps:
        click.echo(f"\n==> {step.title} <==\n{step.text}")
