"""``primerl-hpc logs``: print or follow the logs of a run."""

from __future__ import annotations

import re
import time

import click

from primerl_hpc.cli.options import RUN_CODES, lines_option, make_epilog
from primerl_hpc.cli.values import PROCESS, RUN

EPILOG = make_epilog(
    "logs my-run                   all roles, sorted by time",
    "logs my-run trainer -f",
    "logs my-run trainer --rank 1 --attempt 2",
    "logs my-run --node gpu-b --since 10m --grep 'ERROR|Traceback'",
    "logs my-run job               output of the batch job",
    codes=RUN_CODES,
)


@click.command("logs", epilog=EPILOG)
@click.argument("run", type=RUN)
@click.argument("role", type=PROCESS, required=False)
@click.option("--follow", "-f", is_flag=True, help="Print new lines until the run ends.")
@click.option(
    "--rank", type=click.IntRange(min=0), metavar="R", help="Select one rank of a trainer, on any node."
)
@click.option("--node", metavar="HOST", help="Select processes on one node.")
@click.option(
    "--attempt",
    type=click.IntRange(min=1),
    metavar="K",
    help="Select an earlier attempt. [default: the latest]",
)
@click.option(
    "--since", metavar="TIME", help="Select lines from the last 90s, 10m, 2h or 1d, or since 14:30."
)
@click.option("--grep", "pattern", metavar="REGEX", help="Select lines that match.")
@lines_option(40, "Print this many last lines of each file.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each log line.")
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
    """Print or follow the logs of RUN, of all roles or of ROLE.

    ROLE is a role (trainer, orchestrator, inference, router, env-server), one process of a role (inference-0), or `job`
    for the output of the batch job.
    """
    from primerl_hpc.observe.log_files import LogFiles
    from primerl_hpc.observe.merged_logs import (
        LogFilter,
        LogFollower,
        follow_logs,
        missing_log_error,
        parse_since,
        print_logs,
    )
    from primerl_hpc.observe.status.job_watcher import JobWatcher
    from primerl_hpc.run.registry import find_run

    try:
        chosen = LogFilter(
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
                found, LogFollower(files, role, node, rank, attempt, lines, chosen, as_json), JobWatcher()
            )
        except KeyboardInterrupt:
            click.echo()
        return
    chosen_files = files.choose(role, node=node, rank=rank, attempt=attempt)
    if not print_logs(chosen_files, lines, chosen, as_json=as_json):
        raise missing_log_error(found, attempt, role)
