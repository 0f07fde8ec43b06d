"""``primerl-hpc diagnose``"""

from __future__ import annotations

import click

from primerl_hpc.cli.options import json_option, print_json


@click.command("diagnose", epilog="Example:  primerl-hpc diagnose my-run")
@click.argument("run")
@click.option("--lines", "-n", default=15, show_default=True, help="Last lines of the log to show.")
@json_option
def command(run: str, lines: int, as_json: bool) -> None:
    """The first fault of RUN: who, where, how it ended, its last lines, and what to do."""
    from primerl_hpc.common.registry import find_run
    from primerl_hpc.observe.diagnose import diagnose

    found = find_run(run)
    result = diagnose(found)
    if as_json:
        print_json(result)
        return
    click.echo(f"{result['run']}: {result['state']}")
    failure = result["failure"]
    if failure:
        rank = f", rank {failure['rank']}" if failure.get("rank") is not None else ""
        ended = failure.get("signal") or f"exit code {failure.get('exit_code')}"
        click.echo(
            f"  {failure['process']} on {failure['node']}{rank}, attempt {failure['attempt']}: {ended}"
        )
        click.echo(f"  {failure['message']}")
        click.echo(f"\nlast lines of {failure['log']}:")
        for line in failure["last_lines"][-lines:]:
            click.echo(f"    {line}")
    click.echo(f"\n{result['advice']}")
