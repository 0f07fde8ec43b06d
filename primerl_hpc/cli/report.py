"""``primerl-hpc report``: write an HTML report of a run."""

from __future__ import annotations

from pathlib import Path

import click

from primerl_hpc.cli.options import RUN_CODES, json_option, make_epilog, print_json
from primerl_hpc.cli.values import RUN

EPILOG = make_epilog("report my-run", "report my-run --out ~/public_html/my-run.html", codes=RUN_CODES)


@click.command("report", epilog=EPILOG)
@click.argument("run", type=RUN)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write the report to this file. [default: report.html of the run]",
)
@json_option
def command(run: str, out: Path | None, as_json: bool) -> None:
    """Write an HTML page about RUN: curves, evaluations, attempts, hours, failures, recipe and versions.

    The page is self-contained, so it can be archived or sent.
    """
    from primerl_hpc.common.files import write_text
    from primerl_hpc.launch.planning.advice import refresh
    from primerl_hpc.observe.diagnose.diagnose import diagnose
    from primerl_hpc.observe.report.report import make_report
    from primerl_hpc.observe.status.job_watcher import JobWatcher
    from primerl_hpc.observe.status.one_run import OneRun
    from primerl_hpc.observe.status.usage import Accounting
    from primerl_hpc.run.access.ownership import check_may_change, check_may_read
    from primerl_hpc.run.registry import find_run

    found = find_run(run)
    check_may_read(found)
    if out is None:
        check_may_change(found, hint="write its report elsewhere with --out FILE")
    refresh(found)
    view = OneRun(found, JobWatcher(), Accounting())
    view.refresh()
    path = out.expanduser() if out is not None else found.report
    write_text(path, make_report(view, diagnose(found)))
    if as_json:
        print_json({"run": found.root.name, "report": str(path)})
    else:
        click.echo(str(path))
