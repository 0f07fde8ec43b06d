"""``primerl-hpc calibrate``: measure a node, so that plans for it use measured speeds."""

from __future__ import annotations

import statistics
import sys
from typing import TYPE_CHECKING

import click

from primerl_hpc.cli.options import json_option, load_chosen_profile, make_epilog, print_json, profile_option
from primerl_hpc.common.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from primerl_hpc.launch.bench.calibrate import Calibration

EPILOG = make_epilog(
    "calibrate -p h100x64",
    "calibrate -p my-site.yaml --node-type l40s --partition debug",
    codes=(ExitCode.NOT_FOUND, ExitCode.UNAVAILABLE, ExitCode.CONFIG),
)


@click.command("calibrate", epilog=EPILOG)
@profile_option
@click.option(
    "--node-type", metavar="TYPE", help="Measure a node of this entry of node_types. [default: node]"
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1.0),
    default=90.0,
    show_default=True,
    help="Time for all measurements together; starting the processes comes in addition.",
)
@click.option("--no-save", is_flag=True, help="Print the result without adding it to the ledger.")
@json_option
def command(
    profile_name: str | None, node_type: str | None, seconds: float, no_save: bool, as_json: bool
) -> int:
    """Measure one node for the planner: matrix products, memory, collectives within the node, file writes.

    With a SLURM profile this is a job of one node that takes about two minutes; otherwise this machine is measured. The
    rows are added to the ledger, from which later plans for the same GPU type take their corrections.
    """
    from primerl_hpc.common import env
    from primerl_hpc.launch.bench.calibrate import calibrate
    from primerl_hpc.run.ledger.store import append_rows, user_ledger

    profile = load_chosen_profile(profile_name or env.default_profile() or "local").profile
    found = calibrate(
        profile, node_type=node_type, seconds=seconds, report=lambda line: print(line, file=sys.stderr)
    )
    path = user_ledger()
    if not no_save:
        try:
            append_rows(path, found.rows)
        except OSError as error:
            raise ConfigError(
                f"the ledger cannot be written: {error.strerror or error}",
                location=str(path),
                hint="set PRIMERL_HOME to a writable folder, or use --no-save",
            ) from None
    if as_json:
        print_json(
            {
                "node": found.node,
                "device": found.device,
                "gpu": found.gpu,
                "ledger": None if no_save else str(path),
                "rows": [row.as_json() for row in found.rows],
            }
        )
        return ExitCode.DONE
    _show(found)
    click.echo("not saved" if no_save else f"{len(found.rows)} rows added to {path}")
    return ExitCode.DONE


def _show(found: Calibration) -> None:
    """Print one line per kind of measurement: the number of rows, and measured against predicted time."""
    click.echo(f"{found.node}: {found.device}")
    for figure in dict.fromkeys(row.figure for row in found.rows):
        rows = [row for row in found.rows if row.figure == figure]
        ratios = [row.measured / row.predicted for row in rows if row.predicted]
        if ratios:
            text = (
                f"{statistics.median(ratios):.2f} × the predicted time ({min(ratios):.2f}–{max(ratios):.2f})"
            )
        else:
            fastest, slowest = min(row.measured for row in rows), max(row.measured for row in rows)
            text = f"{_duration(fastest)} to {_duration(slowest)}, not predicted"
        click.echo(f"  {figure.removeprefix('hardware.'):<12} {len(rows):>3} measured: {text}")


def _duration(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.1f} ms"
