"""``primerl-hpc top``: the logs of runs side by side in tmux."""

from __future__ import annotations

import os
import re
import shutil
import sys

import click

from primerl_hpc.cli.options import RUN_CODES, json_option, make_epilog, print_json
from primerl_hpc.cli.values import RUN

EPILOG = make_epilog("top my-run", "top run-1 run-2 --session compare", codes=RUN_CODES)


@click.command("top", epilog=EPILOG)
@click.argument("runs", type=RUN, nargs=-1, required=True, metavar="RUN...")
@click.option("--session", metavar="NAME", help="Name of the tmux session. [default: primerl-<run>]")
@json_option
def command(runs: tuple[str, ...], session: str | None, as_json: bool) -> None:
    """Follow each RUN in a window with four panes: trainer, orchestrator, inference, environment servers.

    The panes wait for a run that has not started, and follow it across attempts. If the session exists, it is shown.
    Without tmux, the commands of the panes are printed. Outside of a terminal the session is started in the
    background.
    """
    from primerl_hpc.observe.inside.panes import attach_command, open_session, panes_of, session_name
    from primerl_hpc.run.registry import find_run

    found = [find_run(run) for run in runs]
    if session is not None and not re.fullmatch(r"[\w-]+", session):
        raise click.BadParameter("letters, digits, '_' and '-' only", param_hint="--session")
    name = session or session_name(found)
    panes = {run.root.name: panes_of(run) for run in found}
    commands = {run: [pane.command for pane in own] for run, own in panes.items()}
    has_tmux = shutil.which("tmux") is not None
    is_new = has_tmux and open_session(name, panes)
    attach = attach_command(name)
    if as_json:
        print_json({"session": name if has_tmux else None, "is_new": is_new, "panes": commands})
    elif not has_tmux:
        click.echo("tmux is not installed here; these commands follow the runs:", err=True)
        click.echo("\n".join(line for lines in commands.values() for line in lines))
    elif sys.stdout.isatty():
        os.execvp(attach[0], attach)
    else:
        click.echo(f"{'started' if is_new else 'exists'}; show it with:  {' '.join(attach)}")
