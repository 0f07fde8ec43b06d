"""``primerl-hpc report``"""

from __future__ import annotations

from pathlib import Path

import click

from primerl_hpc.cli.options import json_option, print_json

EPILOG = """\b
Examples:
  primerl-hpc report my-run
  primerl-hpc report my-run --out ~/public_html/my-run.html
"""


@click.command("report", epilog=EPILOG)
@click.argument("run")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Where to write it. [default: report.html of the run]"
)
@json_option
def command(run: str, out: Path | None, as_json: bool) -> None:
    """One HTML page of RUN: curves, evaluations, attempts, hours, faults, recipe and versions.

    It needs nothing outside itself, so it can be sent or kept.
    """
    from primerl_hpc.common.files import write_text
    from primerl_hpc.common.registry import find_run
    from primerl_hpc.observe.depth import OneRun
    from primerl_hpc.observe.diagnose import diagnose
    from primerl_hpc.observe.report import make_report
    from primerl_hpc.observe.slurm import JobWatcher
    from primerl_hpc.observe.usage import Accounting

    found = find_run(run)
    view = OneRun(found, JobWatcher(), Accounting())
    view.look()
    path = out.expanduser() if out is not None else found.report
    write_text(path, make_report(view, diagnose(found)))
    if as_json:
        print_json({"run": found.root.name, "report": str(path)})
    else:
        click.echo(str(path))
