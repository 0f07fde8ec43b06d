"""``primerl-hpc sync``: send the metrics of a run to its trackers from this machine."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from primerl_hpc.cli.options import RUN_CODES, json_option, make_epilog, print_json
from primerl_hpc.cli.values import RUN
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.safety.printable import one_line

if TYPE_CHECKING:
    from primerl_hpc.tracking.sync import SyncReport

EPILOG = make_epilog(
    "sync my-run",
    "sync my-run --watch",
    codes=(*RUN_CODES, ExitCode.UNAVAILABLE, ExitCode.CONFIG),
    more="Code 69: a tracker does not accept rows now; run the command again.",
)


@click.command("sync", epilog=EPILOG)
@click.argument("run", type=RUN)
@click.option("--watch", is_flag=True, help="Continue until the run has ended and every row was sent.")
@json_option
def command(run: str, watch: bool, as_json: bool) -> int:
    """Send the metrics of RUN to the trackers of its recipe from this machine, such as a login node with internet.

    Use it with tracking.relay: true in the recipe, or after a run has ended. Each call continues where the last one
    ended, also after ^C or a lost connection.
    """
    from primerl_hpc.plan.plan import load_plan
    from primerl_hpc.run.access.ownership import check_own
    from primerl_hpc.run.registry import find_run
    from primerl_hpc.tracking.sync import sync

    found = find_run(run)
    check_own(found)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    last: list[SyncReport] = []

    def show(reports: list[SyncReport]) -> None:
        for report in (report for report in reports if report not in last and not as_json):
            click.echo(_line(report))
        last[:] = reports

    reports = sync(found, load_plan(found).phases[-1].recipe, ended, watch=watch, show=show)
    if as_json:
        print_json({"run": found.root.name, "targets": [asdict(report) for report in reports]})
    return ExitCode.DONE if all(report.is_complete for report in reports) else ExitCode.UNAVAILABLE


def _line(report: SyncReport) -> str:
    trouble = f"; the rest waits: {one_line(report.error)}" if report.error else ""
    return f"{report.target}: {report.sent} rows sent{trouble}"
