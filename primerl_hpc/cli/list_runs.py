"""``primerl-hpc list``"""

from __future__ import annotations

import time

import click

from primerl_hpc.cli.options import json_option, print_json


@click.command("list", epilog="Example:  primerl-hpc list --json")
@json_option
def command(as_json: bool) -> None:
    """Names and folders of your runs, newest first."""
    from primerl_hpc.common.registry import list_runs

    runs = list_runs()
    if as_json:
        print_json([{"run": run.name, "run_dir": str(run.path), "submitted": run.submitted} for run in runs])
        return
    for run in runs:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.submitted))
        click.echo(f"{run.name:<32} {when}  {run.path}")
