"""``primerl-hpc logs``"""

from __future__ import annotations

import re
import time

import click

from primerl_hpc.cli.options import lines_option

EPILOG = """\b
Examples:
  primerl-hpc logs my-run                   all roles, by time
  primerl-hpc logs my-run trainer -f
  primerl-hpc logs my-run trainer --rank 1 --attempt 2
  primerl-hpc logs my-run --node gpu-b --since 10m --grep 'ERROR|Traceback'
  primerl-hpc logs my-run job               what SLURM's job printed
"""


@click.command("logs", epilog=EPILOG)
@click.argument("run")
@click.argument("role", required=False)
@click.option("--follow", "-f", is_flag=True, help="Go on as lines come, until the run ends.")
@click.option(
    "--rank", type=click.IntRange(min=0), metavar="R", help="One rank of a trainer, on whichever node."
)
@click.option("--node", metavar="HOST", help="What runs on one node.")
@click.option(
    "--attempt", type=click.IntRange(min=1), metavar="K", help="An earlier attempt. [default: the latest]"
)
@click.option("--since", metavar="TIME", help="Lines since 90s, 10m, 2h, 1d ago, or since 14:30.")
@click.option("--grep", "pattern", metavar="REGEX", help="Lines that match.")
@lines_option(40, "Last lines of each file.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object for each line of the logs.")
def command(
    run: str,
    role: str | None,
    follow: bool,
    rank: int | None,
    node: str | None,
    attempt: int | None,
    since: str | None,
    pattern: str | None,
    lines: int,
    as_json: bool,
) -> None:
    """Print or follow the logs of RUN: of all roles, or of ROLE.

    ROLE is a role (trainer, orchestrator, inference, router, env-server), one process of it (inference-0), or `job` for
    the output of the batch job itself.
    """
    from primerl_hpc.common.registry import find_run
    from primerl_hpc.observe.logfiles import LogFiles
    from primerl_hpc.observe.logs import (
        Filter,
        Follower,
        follow_logs,
        parse_since,
        print_logs,
        what_is_missing,
    )
    from primerl_hpc.observe.slurm import JobWatcher

    try:
        chosen = Filter(
            parse_since(since, time.time()) if since else None, re.compile(pattern) if pattern else None
        )
    except re.error as error:
        raise click.UsageError(f"--grep: {error}") from None
    except ValueError as error:
        raise click.UsageError(f"--since: {error}") from None
    found = find_run(run)
    files = LogFiles(found)
    if follow:
        try:
            follow_logs(
                found, Follower(files, role, node, rank, attempt, lines, chosen, as_json), JobWatcher()
            )
        except KeyboardInterrupt:
            click.echo()
        return
    chosen_files = files.choose(role, node=node, rank=rank, attempt=attempt)
    if not print_logs(chosen_files, lines, chosen, as_json=as_json):
        raise what_is_missing(found)
