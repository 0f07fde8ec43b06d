"""``primerl-hpc diagnose``"""

from __future__ import annotations

import click

from primerl_hpc.cli.options import json_option, lines_option, print_json


@click.command("diagnose", epilog="Example:  primerl-hpc diagnose my-run")
@click.argument("run")
@lines_option(15, "Last lines of the log to show.")
@json_option
def command(run: str, lines: int, as_json: bool) -> None:
    """What is wrong with RUN, how to mend it, and the next command.

    Of a failed run: the first fault (role, node, rank, exit code or signal), SLURM's verdict, last lines, and whether
    trying again can help. Of one that waits: why. Of one that runs: whether it moves.
    """
    from primerl_hpc.common.registry import find_run
    from primerl_hpc.observe.diagnose import diagnose, tell

    found = diagnose(find_run(run))
    if as_json:
        print_json(found.as_json())
    else:
        click.echo(tell(found, lines))
