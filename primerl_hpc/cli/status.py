"""``primerl-hpc status``"""

from __future__ import annotations

import shutil
import sys
from functools import partial
from typing import TYPE_CHECKING

import click

from primerl_hpc.cli.options import json_option, print_json, run_argument
from primerl_hpc.common.names import RunState

if TYPE_CHECKING:
    from primerl_hpc.observe.screen import View

EPILOG = """\b
Examples:
  primerl-hpc status
  primerl-hpc status --state failed --name 'math-*'
  primerl-hpc status reverse-text-tiny-001 --watch
"""
DEFAULT_ROWS = 20
SLURM_TIMEOUT_S = 5.0
"""A person waits: after this the run's own files have to do, and the screen says so."""


@click.command("status", epilog=EPILOG)
@run_argument
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([state.value for state in RunState]),
    metavar="STATE",
    help="Runs in this state only (running, failed, …); repeatable.",
)
@click.option("--name", "pattern", metavar="GLOB", help="Runs with such names only.")
@click.option("--all", "is_all", is_flag=True, help="All runs, not as many as fit on the screen.")
@click.option(
    "--watch",
    "-w",
    "is_watching",
    is_flag=True,
    help="Redraw until ^C; with --json a line whenever something changed.",
)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    help="Seconds between redraws; more while nothing changes.",
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
    """All runs on one screen, or RUN (a name, its beginning, or a path) in depth.

    SLURM is asked once for all of them.
    """
    from primerl_hpc.common.slurm import ask
    from primerl_hpc.observe.slurm import JobWatcher

    ask_briefly = partial(ask, timeout_s=SLURM_TIMEOUT_S)
    jobs = JobWatcher(ask_briefly)
    view: View
    if run is None:
        from primerl_hpc.observe.table import AllRuns

        view = AllRuns(jobs, states, pattern, None if is_all else _rows())
    elif states or pattern or is_all:
        raise click.UsageError("--state, --name and --all choose among all runs: leave RUN out")
    else:
        from primerl_hpc.common.registry import find_run
        from primerl_hpc.observe.depth import OneRun
        from primerl_hpc.observe.usage import Accounting

        view = OneRun(find_run(run), jobs, Accounting(ask_briefly))
    if is_watching:
        from primerl_hpc.observe.screen import watch

        watch(view, interval, as_json=as_json)
        return
    view.look()
    if as_json:
        print_json(view.as_json())
    else:
        click.echo(view.text())


def _rows() -> int:
    """Runs that fit between the table's head and the prompt."""
    return max(5, shutil.get_terminal_size().lines - 4) if sys.stdout.isatty() else DEFAULT_ROWS
