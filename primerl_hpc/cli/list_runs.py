"""``primerl-hpc list``: list all runs of the user."""

from __future__ import annotations

import click

from primerl_hpc.cli.options import json_option, make_epilog, print_json


@click.command("list", epilog=make_epilog("list --json", "list --forget-gone"))
@click.option(
    "--forget-gone", is_flag=True, help="Remove runs whose directory no longer exists from the list."
)
@json_option
def command(forget_gone: bool, as_json: bool) -> None:
    """List every run that you submitted with its folder, newest first.

    The list includes runs whose folder no longer exists. States are read from the runs' files; `status` also queries
    SLURM.
    """
    from primerl_hpc.observe.status.all_runs import list_table
    from primerl_hpc.observe.status.run_catalog import RunCatalog
    from primerl_hpc.run.registry import forget_runs

    runs = sorted(RunCatalog(None).list_runs(), key=lambda run: -run.registered.submitted)
    if forget_gone:
        forget_runs(run.registered for run in runs if not run.exists)
        runs = [run for run in runs if run.exists]
    if as_json:
        print_json([run.as_json() for run in runs])
        return
    if not runs:
        click.echo("no runs yet; start one with primerl-hpc submit", err=True)
    for line in list_table(runs):
        click.echo(line)
