"""``primerl-hpc cancel``: stop a run, with or without saving."""

from __future__ import annotations

import shlex

import click

from primerl_hpc.cli.options import json_option, make_epilog, print_json
from primerl_hpc.cli.values import RUN
from primerl_hpc.common.errors import ExitCode

EPILOG = make_epilog(
    "cancel my-run",
    "cancel my-run --now",
    codes=(ExitCode.NOT_FOUND, ExitCode.UNAVAILABLE, ExitCode.OCCUPIED),
)


@click.command("cancel", epilog=EPILOG)
@click.argument("run", type=RUN)
@click.option("--now", is_flag=True, help="Stop the run immediately, without saving.")
@click.option("--wait", is_flag=True, help="Wait until the run has ended.")
@json_option
def command(run: str, now: bool, wait: bool, as_json: bool) -> int:
    """Ask RUN to save a checkpoint and stop, or stop it immediately with --now."""
    from primerl_hpc.common.names import RunState
    from primerl_hpc.launch.cancel import cancel_run
    from primerl_hpc.run.registry import find_run

    found = find_run(run)
    state = cancel_run(found, now=now, wait=wait)
    if as_json:
        print_json({"run": found.root.name, "state": state.value})
    elif state.is_final:
        click.echo(f"{found.root.name} has ended: {state.value}")
    elif state == RunState.UNKNOWN:
        click.echo(f"{found.root.name} has no job")
    else:
        action = "is being stopped" if now else "will save and stop"
        click.echo(
            f"{found.root.name} {action}; watch it:  primerl-hpc status {shlex.quote(found.root.name)} --watch"
        )
    return 0
