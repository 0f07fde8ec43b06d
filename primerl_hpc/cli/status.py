"""``primerl-hpc status``: show all runs, or one run in detail."""

from __future__ import annotations

import shutil
import sys
from functools import partial
from typing import TYPE_CHECKING

import click

from primerl_hpc.cli.options import (
    RUN_CODES,
    json_option,
    make_epilog,
    print_json,
    refuse_options,
    run_argument,
)
from primerl_hpc.common.names import RunState

if TYPE_CHECKING:
    from primerl_hpc.observe.status.screen import View

EPILOG = make_epilog(
    "status",
    "status --state failed --name 'math-*'",
    "status reverse-text-tiny-001 --watch",
    "status --list --forget-gone",
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
@click.option(
    "--list", "is_list", is_flag=True, help="List names and folders of all runs, without asking SLURM."
)
@click.option(
    "--forget-gone", is_flag=True, help="With --list: forget runs whose directory no longer exists."
)
@json_option
def command(
    run: str | None,
    states: tuple[str, ...],
    pattern: str | None,
    is_all: bool,
    is_watching: bool,
    interval: float,
    is_list: bool,
    forget_gone: bool,
    as_json: bool,
) -> None:
    """Show all runs on one screen, or RUN (a name, a prefix of it, or a path) in detail.

    One SLURM query covers all runs. --list also has runs whose folder no longer exists.
    """
    from primerl_hpc.observe.status.job_watcher import JobWatcher
    from primerl_hpc.slurm.commands import ask

    if forget_gone and not is_list:
        raise click.UsageError("--forget-gone needs --list")
    if is_list:
        others = {"run", "states", "pattern", "is_all", "is_watching", "interval"}
        refuse_options(others, "does not apply to --list")
        _list_runs(forget_gone=forget_gone, as_json=as_json)
        return
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


def _list_runs(*, forget_gone: bool, as_json: bool) -> None:
    """Print every run of the user, newest first, with the state that its files report."""
    from primerl_hpc.observe.status.all_runs import list_table
    from primerl_hpc.observe.status.run_catalog import RunCatalog
    from primerl_hpc.run.registry import forget_runs

    runs = sorted(RunCatalog(None).list_runs(), key=lambda run: -run.registered.submitted)
    if forget_gone:
        forget_runs(run.registered for run in runs if not run.exists)
        runs = [run for run in runs if run.exists]
    if as_json:
        print_json([run.as_json() for run in runs])
        return
    if not runs:
        click.echo("no runs yet; start one with primerl-hpc submit", err=True)
    for line in list_table(runs):
        click.echo(line)


def _rows() -> int:
    """Return the number of runs that fit between the table's head and the prompt."""
    return max(5, shutil.get_terminal_size().lines - 4) if sys.stdout.isatty() else DEFAULT_ROWS
