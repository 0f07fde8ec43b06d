"""``primerl-hpc diagnose``: explain the state of a run."""

from __future__ import annotations

import click

from primerl_hpc.cli.options import RUN_CODES, json_option, lines_option, make_epilog, print_json
from primerl_hpc.cli.values import RUN

EPILOG = make_epilog("diagnose my-run", codes=RUN_CODES)


@click.command("diagnose", epilog=EPILOG)
@click.argument("run", type=RUN)
@lines_option(15, "Show this many last lines of the log.")
@json_option
def command(run: str, lines: int, as_json: bool) -> None:
    """Explain what is wrong with RUN, how to fix it, and the next command.

    For a failed run, show the root cause (role, node, rank, exit code or signal), SLURM's result, the last log lines,
    and whether a retry can succeed. For a queued run, show why it waits; for an active run, whether it makes progress.
    """
    from primerl_hpc.observe.diagnose.diagnose import diagnose, render_diagnosis
    from primerl_hpc.run.access.ownership import check_may_read
    from primerl_hpc.run.registry import find_run

    chosen = find_run(run)
    check_may_read(chosen)
    found = diagnose(chosen)
    if as_json:
        print_json(found.as_json())
    else:
        click.echo(render_diagnosis(found, lines))
