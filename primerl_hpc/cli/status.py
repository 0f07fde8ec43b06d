"""``primerl-hpc status``: show all runs, or one run in detail."""

from __future__ import annotations

import shutil
import sys
from functools import partial
from typing import TYPE_CHECKING

import click

from primerl_hpc.cli.options import RUN_CODES, json_option, make_epilog, print_json, run_argument
from primerl_hpc.common.names import RunState

if TYPE_CHECKING:
    from primerl_hpc.observe.status.screen import View

EPILOG = make_epilog(
    "status",
    "status --state failed --name 'math-*'",
    "status reverse-text-tiny-001 --watch",
    codes=RUN_CODES,
)
DEFAULT_ROWS = 20
"""Number of runs to show if stdout is not a terminal."""
SLURM_TIMEOUT_S = 5.0
"""Seconds to wait for SLURM; after that, only the runs' files are used, and the output notes it."""


@click.command("status", epilog=EPILOG)
@run_argument
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([state.value for state in RunState]),
    metavar="STATE",
    help="Show only runs in this state (running, failed, …); repeatable.",
)
@click.option("--name", "pattern", metavar="GLOB", help="Show only runs with a matching name.")
@click.option("--all", "is_all", is_flag=True, help="Show all runs, not only as many as fit on the screen.")
@click.option(
    "--watch",
    "-w",
    "is_watching",
    is_flag=True,
    help="Redraw until ^C. With --json, print a line for each change.",
)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    help="Redraw every this many seconds; less often while nothing changes.",
)
@json_option
def command(
    run: str | None,
    states: tuple[str, ...],
    pattern: str | None,
    is_all: bool,
    is_watching: bool,
    interval: float,
    as_json: bool,
) -> None:
    """Show all runs on one screen, or RUN (a name, a prefix of it, or a path) in detail.

    One SLURM query covers all runs.
    """
    from primerl_hpc.observe.status.job_watcher import JobWatcher
    from primerl_hpc.slurm.commands import ask

    ask_briefly = partial(ask, timeout_s=SLURM_TIMEOUT_S)
    jobs = JobWatcher(ask_briefly)
    view: View
    if run is None:
        from primerl_hpc.observe.status.all_runs import AllRuns

        view = AllRuns(jobs, states, pattern, None if is_all else _rows())
    elif states or pattern or is_all:
        raise click.UsageError("--state, --name and --all select among all runs; remove RUN")
    else:
        from primerl_hpc.launch.planning.advice import refresh
        from primerl_hpc.observe.status.one_run import OneRun
        from primerl_hpc.observe.status.usage import Accounting
        from primerl_hpc.run.registry import find_run

        found = find_run(run)
        refresh(found)
        view = OneRun(found, jobs, Accounting(ask_briefly))
    if is_watching:
        from primerl_hpc.observe.status.screen import watch

        watch(view, interval, as_json=as_json)
        return
    view.refresh()
    if as_json:
        print_json(view.as_json())
    else:
        click.echo(view.text())


def _rows() -> int:
    """Return the number of runs that fit between the table's head and the prompt."""
    return max(5, shutil.get_terminal_size().lines - 4) if sys.stdout.isatty() else DEFAULT_ROWS
