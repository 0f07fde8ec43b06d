"""``primerl-hpc submit``"""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from primerl_hpc.cli.options import chain_options, json_option, load_both, print_json, recipe_and_profile
from primerl_hpc.observe.text import shown

EPILOG = """\b
Examples:
  primerl-hpc submit recipes/reverse_text/tiny.yaml -p local --follow
  primerl-hpc submit my.yaml -p h100x64 --set max_steps=200 --dry-run
  primerl-hpc submit my.yaml -p h100x64 --partition debug --time 30
  primerl-hpc submit my.yaml -p h100x64 --profile-set scheduler.exclude=n07
  primerl-hpc submit my.yaml -p h100x64 --chain 5
"""


@click.command("submit", epilog=EPILOG)
@recipe_and_profile
@click.option(
    "--run-dir", type=click.Path(path_type=Path), help="Where the run lives. [default: runs/<name>-<number>]"
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check and show everything; with --run-dir also prepare it. Start nothing.",
)
@click.option("--follow", "-f", is_flag=True, help="Show progress until the run ends; ^C leaves it running.")
@chain_options
@json_option
def command(
    recipe: str,
    profile_name: str | None,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    dry_run: bool,
    follow: bool,
    links: int,
    until_done: bool,
    as_json: bool,
) -> int:
    """Compile RECIPE for a cluster and start it."""
    from primerl_hpc.launch.chain import ChainRequest
    from primerl_hpc.launch.submit import submit_run

    loaded, profile = load_both(recipe, profile_name, overrides)
    chain = ChainRequest(links, until_done)
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


def _dry_run(loaded, profile, run_dir: Path | None, chain, as_json: bool) -> int:  # type: ignore[no-untyped-def]
    from primerl_hpc.cli.plan import show_plan
    from primerl_hpc.launch.prepare import job_script, make_script
    from primerl_hpc.launch.submit import check_run, prepare_run

    if run_dir is not None:
        run, plan = prepare_run(loaded, profile, run_dir, chain)
        script, path = job_script(run).read_text(), job_script(run)
    else:
        plan = check_run(loaded, profile, chain)
        script, path = make_script(plan, profile), None
    if as_json:
        print_json(
            {"plan": plan.model_dump(mode="json"), "script": script, "path": str(path) if path else None}
        )
        return 0
    show_plan(plan)
    click.echo("\nbatch script:\n")
    click.echo("".join(f"    {line}" for line in script.splitlines(keepends=True)))
    launcher = "sbatch" if plan.scheduler == "slurm" else "bash"
    if path is not None:
        click.echo(f"prepared; start it by hand with:  {launcher} {shlex.quote(str(path))}")
    else:
        click.echo("nothing was written or started; --run-dir D prepares D as well")
    return 0
