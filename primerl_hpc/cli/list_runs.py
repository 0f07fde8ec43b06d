"""``primerl-hpc list``"""

from __future__ import annotations

import time

import click

from primerl_hpc.cli.options import json_option, print_json


@click.command("list", epilog="Examples:  primerl-hpc list --json\n\n  primerl-hpc list --forget-gone")
@click.option("--forget-gone", is_flag=True, help="Take runs whose directory is gone out of the list.")
@json_option
def command(forget_gone: bool, as_json: bool) -> None:
    """Every run you submitted with its folder, newest first; also those whose folder is gone.

    States are what the runs' own files say; `status` also asks SLURM.
    """
    from primerl_hpc.common.registry import forget_runs
    from primerl_hpc.observe.catalog import Catalog

    briefs = sorted(Catalog(None).look(), key=lambda brief: -brief.registered.submitted)
    if forget_gone:
        forget_runs(brief.registered for brief in briefs if not brief.is_there)
        briefs = [brief for brief in briefs if brief.is_there]
    if as_json:
        print_json([brief.as_json() for brief in briefs])
        return
    for brief in briefs:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(brief.registered.submitted))
        state = brief.state.value if brief.is_there else "gone"
        click.echo(f"{brief.name:<32} {when}  {state:<9}  {brief.registered.root}")
