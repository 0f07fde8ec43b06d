"""``primerl-hpc submit``"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from primerl_hpc.cli.options import (
    chain_options,
    json_option,
    load_both,
    print_json,
    profile_option,
    set_option,
)
from primerl_hpc.observe.text import shown

if TYPE_CHECKING:
    from primerl_hpc.cluster.load import LoadedProfile
    from primerl_hpc.launch.chain import ChainRequest
    from primerl_hpc.recipe.load import LoadedRecipe

EPILOG = """\b
Examples:
  primerl-hpc submit recipes/reverse_text/tiny.yaml -p local --follow
  primerl-hpc submit my.yaml -p h100x64 --set max_steps=200 --dry-run
  primerl-hpc submit my.yaml -p h100x64 --partition debug --time 30
  primerl-hpc submit my.yaml -p h100x64 --profile-set scheduler.exclude=n07
  primerl-hpc submit my.yaml -p h100x64 --chain 5
"""


def submit_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--profile P --set k=v --run-dir D --dry-run --follow``"""
    run_dir = click.option(
        "--run-dir",
        type=click.Path(path_type=Path),
        help="Where the run lives. [default: runs/<name>-<number>]",
    )
    dry_run = click.option(
        "--dry-run",
        is_flag=True,
        help="Check and show everything; with --run-dir also prepare it. Start nothing.",
    )
    follow = click.option(
        "--follow", "-f", is_flag=True, help="Show progress until the run ends; ^C leaves it running."
    )
    return profile_option(set_option(run_dir(dry_run(follow(function)))))


@click.command("submit", epilog=EPILOG)
@click.argument("recipe")
@submit_options
@chain_options
@json_option
def command(
    recipe: str,
    profile_name: str | None,
    overrides: tuple[str, ...],
    links: int,
    until_done: bool,
    **how: Any,
) -> int:
    """Compile RECIPE for a cluster and start it."""
    from primerl_hpc.launch.chain import ChainRequest

    loaded, profile = load_both(recipe, profile_name, overrides)
    return submit(loaded, profile, ChainRequest(links, until_done), **how)


def submit(
    loaded: LoadedRecipe,
    profile: LoadedProfile,
    chain: ChainRequest | None = None,
    *,
    run_dir: Path | None,
    dry_run: bool,
    follow: bool,
    as_json: bool,
) -> int:
    """The exit code: of the run where it is followed."""
    from primerl_hpc.launch.submit import ONE_JOB, submit_run

    chain = chain or ONE_JOB
    if dry_run:
        return _dry_run(loaded, profile, run_dir, chain, as_json)
    submitted = submit_run(loaded, profile, run_dir, chain)
    root, jobs = submitted.run.root, submitted.links or (submitted.job_id,)
    if as_json:
        print_json({"run": root.name, "run_dir": str(root), "job_id": submitted.job_id, "jobs": jobs})
    else:
        click.echo(f"run {root.name} · job {' → '.join(jobs)} ({submitted.plan.scheduler})")
        click.echo(f"    {shown(root)}")
    if follow:
        from primerl_hpc.observe.follow import follow_run

        return follow_run(submitted.run, quiet=as_json)
    if not as_json:
        click.echo(f"watch it:  primerl-hpc status {root.name} --watch")
    return 0


def _dry_run(
    loaded: LoadedRecipe, profile: LoadedProfile, run_dir: Path | None, chain: ChainRequest, as_json: bool
) -> int:
    from primerl_hpc.cli.plan import show_plan
    from primerl_hpc.launch.after import export_script, make_scripts
    from primerl_hpc.launch.prepare import engines_script, job_script
    from primerl_hpc.launch.submit import check_run, prepare_run

    if run_dir is not None:
        run, plan = prepare_run(loaded, profile, run_dir, chain)
        path = job_script(run)
        every = (path, engines_script(run), export_script(run))
        scripts = {each.name: each.read_text() for each in every if each.is_file()}
    else:
        plan, path = check_run(loaded, profile, chain), None
        scripts = make_scripts(plan, profile)
    if as_json:
        made = {"script": scripts["job.sbatch"], "path": str(path) if path else None, "scripts": scripts}
        print_json({"plan": plan.model_dump(mode="json"), **made})
        return 0
    show_plan(plan)
    for name, script in scripts.items():
        click.echo(f"\n{name}:\n")
        click.echo("".join(f"    {line}" for line in script.splitlines(keepends=True)))
    launcher = "sbatch" if plan.scheduler == "slurm" else "bash"
    if path is not None:
        click.echo(f"prepared; start it by hand with:  {launcher} {shlex.quote(str(path))}")
    else:
        click.echo("nothing was written or started; --run-dir D prepares D as well")
    return 0
