"""``primerl-hpc cancel``"""

from __future__ import annotations

import click

from primerl_hpc.cli.options import json_option, print_json


@click.command("cancel", epilog="Examples:  primerl-hpc cancel my-run\n\n  primerl-hpc cancel my-run --now")
@click.argument("run")
@click.option("--now", is_flag=True, help="End it without saving.")
@click.option("--wait", is_flag=True, help="Return when it has ended.")
@json_option
def command(run: str, now: bool, wait: bool, as_json: bool) -> int:
    """Ask RUN to save and stop; with --now end it without saving."""
    from primerl_hpc.common.registry import find_run
    from primerl_hpc.launch.cancel import cancel_run

    found = find_run(run)
    state = cancel_run(found, now=now, wait=wait)
    if as_json:
        print_json({"run": found.root.name, "state": state.value})
    elif state.is_final:
        click.echo(f"{found.root.name} has ended: {state.value}")
    else:
        how = "ends now" if now else "saves and stops"
        click.echo(f"{found.root.name} {how}; watch it:  primerl-hpc status {found.root.name} --watch")
    return 0
