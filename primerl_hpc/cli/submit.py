"""``primerl-hpc submit``: compile a recipe for a cluster and start it."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from primerl_hpc.cli.options import (
    FOLLOWED_CODES,
    SUBMIT_CODES,
    chain_options,
    check_environments,
    confirm,
    dry_run_option,
    follow_option,
    json_option,
    live_code_option,
    load_both,
    make_epilog,
    no_custom_code_option,
    print_json,
    profile_option,
    requested_jobs,
    run_dir_option,
    set_option,
    shared_parent_option,
)
from primerl_hpc.cli.values import RECIPE
from primerl_hpc.common.log import notice
from primerl_hpc.observe.text import display_path

if TYPE_CHECKING:
    from primerl_hpc.cluster.load import LoadedProfile
    from primerl_hpc.common.errors import PrimerlError
    from primerl_hpc.launch.compose import ChainRequest, Submission
    from primerl_hpc.plan.plan import Plan
    from primerl_hpc.recipe.load import LoadedRecipe

EPILOG = make_epilog(
    "submit recipes/reverse_text/tiny.yaml -p local --follow",
    "submit my.yaml -p h100x64 --set max_steps=200 --dry-run",
    "submit my.yaml -p h100x64 --partition debug --time 30",
    "submit my.yaml -p h100x64 --profile-set scheduler.exclude=n07",
    "submit my.yaml -p h100x64 --chain 5",
    "submit my.yaml -p h100x64 --here --follow",
    "submit my.yaml -p h100x64 --chain 9 --budget 500GPUh",
    "submit my.yaml -p local --run-dir runs/debug --overwrite --yes",
    codes=SUBMIT_CODES,
    more=FOLLOWED_CODES,
)


@dataclass(frozen=True)
class SubmitOptions:
    """Options of `command` that do not select the recipe, the profile or the number of jobs."""

    run_dir: Path | None
    dry_run: bool
    is_live: bool
    follow: bool
    overwrite: bool
    yes: bool
    as_json: bool


@click.command("submit", epilog=EPILOG)
@click.argument("recipe", type=RECIPE)
@profile_option
@set_option
@no_custom_code_option
@run_dir_option("Create the run in this directory. [default: runs/<name>-<number>]")
@shared_parent_option
@dry_run_option
@live_code_option
@follow_option
@chain_options
@click.option(
    "--auto-split",
    is_flag=True,
    help="Between jobs, move nodes between engines and trainer if measured rates say that this is faster; sets "
    "layout.auto_split.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Delete the earlier run in --run-dir first. Refused unless it is your own run directory without a running or "
    "queued job.",
)
@click.option("--yes", is_flag=True, help="With --overwrite: do not ask.")
@json_option
def command(
    recipe: str, profile_name: str | None, overrides: tuple[str, ...], auto_split: bool, **options: Any
) -> int:
    """Compile RECIPE for a cluster and start it. A recipe of kind inference serves a model behind a router."""
    from primerl_hpc.launch.submit import submit_run

    overrides += ("layout.auto_split=true",) if auto_split else ()
    loaded, profile = load_both(recipe, profile_name, overrides)
    chain, how = requested_jobs(options), SubmitOptions(**options)
    if chain.is_here and how.dry_run:
        raise click.UsageError("--here starts a run, --dry-run starts nothing: use one")
    if how.overwrite and (how.run_dir is None or how.dry_run or (how.as_json and not how.yes)):
        raise click.UsageError("--overwrite needs --run-dir, excludes --dry-run, and with --json needs --yes")
    check_environments(loaded.recipe)
    if how.dry_run:
        return _dry_run(loaded, profile, chain, how)
    make_room = (lambda submission: _make_room(submission, how)) if how.overwrite else None
    submitted = submit_run(loaded, profile, how.run_dir, chain, is_live=how.is_live, make_room=make_room)
    _note_withheld(submitted.plan)
    root, jobs = submitted.run.root, submitted.links or (submitted.job_id,)
    if how.as_json:
        print_json({"run": root.name, "run_dir": str(root), "job_id": submitted.job_id, "jobs": jobs})
    else:
        click.echo(f"run {root.name} · job {' → '.join(jobs)} ({submitted.plan.scheduler})")
        click.echo(f"    {display_path(root)}")
    if how.follow:
        from primerl_hpc.observe.follow import follow_run

        return follow_run(submitted.run, quiet=how.as_json)
    if not how.as_json:
        click.echo(f"watch it:  primerl-hpc status {shlex.quote(root.name)} --watch")
    return 0


def _make_room(submission: Submission, how: SubmitOptions) -> None:
    """Delete the runs that this one replaces if the user agrees. Raises OccupiedError, or click.Abort if not."""
    from primerl_hpc.launch.storage.overwrite import delete_run, find_replaced
    from primerl_hpc.launch.storage.usage import format_bytes

    replaced = find_replaced(submission)
    for earlier in replaced:
        amount = earlier.amount
        size = f"{amount.num_files:,} files, {format_bytes(amount.size_bytes)}"
        click.echo(f"{display_path(earlier.run.root)}: an earlier run, {size}", err=True)
    if replaced and not how.yes and not confirm("delete it?" if len(replaced) == 1 else "delete them?"):
        raise click.Abort
    for earlier in replaced:
        delete_run(earlier)


def _note_withheld(plan: Plan) -> None:
    """Print a note about secrets of this shell that do not reach the run, although others of their kind do."""
    if names := plan.passed_variables.withheld(os.environ):
        notice(
            f"note: {', '.join(names)} of this shell {'does' if len(names) == 1 else 'do'} not reach the run: secrets "
            f"are passed by name only (env: {{{names[0]}: {{from: {names[0]}}}}} of the recipe)"
        )


def _warn_of_missing_weights(missing: list[PrimerlError], plan: Plan) -> None:
    """Print a warning for missing weights, with which a dry run shows a plan; raise the error about any other file."""
    names = {name for phase in plan.phases for name in (phase.recipe.model.name, phase.model_path)}
    names |= {block.model.name for phase in plan.phases for block in phase.recipe.served_models.values()}
    for error in missing:
        if not any(name in error.cause for name in names):
            raise error
    for fault in dict.fromkeys(map(str, missing)):
        notice(f"warning: {fault} (submit refuses this)")


def _dry_run(loaded: LoadedRecipe, profile: LoadedProfile, chain: ChainRequest, how: SubmitOptions) -> int:
    from primerl_hpc.checks.recipe.model_config import read_model
    from primerl_hpc.cli.plan import show_plan
    from primerl_hpc.launch.checklist import check_run
    from primerl_hpc.launch.submit import prepare_run

    missing: list[PrimerlError] | None = None
    if how.run_dir is not None:
        run, plan = prepare_run(loaded, profile, how.run_dir, chain, is_live=how.is_live)
        path = run.job_script
        files = (path, run.engines_script, run.export_script)
        scripts = {file.name: file.read_text() for file in files if file.is_file()}
    else:
        # a plan can be made without the weights of a model whose configuration is known here
        is_known = read_model(loaded.recipe, profile.profile).content is not None
        missing = [] if is_known else None
        checked, path = check_run(loaded, profile, chain, missing=missing, is_live=how.is_live), None
        plan, scripts = checked.plan, checked.files.scripts
        _warn_of_missing_weights(missing or [], plan)
    code = missing[0].exit_code if missing else 0
    passing, others = plan.passed_variables.split(os.environ)
    if how.as_json:
        found = {"script": scripts["job.sbatch"], "path": str(path) if path else None, "scripts": scripts}
        found |= {"environment": passing, "environment_left_out": others}
        print_json({"plan": plan.model_dump(mode="json"), **found})
        return code
    show_plan(plan)
    for name, script in scripts.items():
        click.echo(f"\n{name}:\n")
        click.echo("".join(f"    {line}" for line in script.splitlines(keepends=True)))
    click.echo(f"{len(passing)} variables of this shell reach the run, {len(others)} do not (names: --json)")
    _note_withheld(plan)
    launcher = "sbatch" if plan.scheduler == "slurm" else "bash"
    if path is not None:
        click.echo(f"prepared; start it manually with:  {launcher} {shlex.quote(str(path))}")
    else:
        click.echo("nothing was written or started; --run-dir D also prepares the directory D")
        click.echo("primerl-hpc plan --scripts --steps shows the srun command and the variables of each role")
    return code
