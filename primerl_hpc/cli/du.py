"""``primerl-hpc du``: how much disk space a run uses, by kind of file."""

from __future__ import annotations

import click

from primerl_hpc.cli.options import RUN_CODES, json_option, make_epilog, print_json
from primerl_hpc.cli.values import RUN

EPILOG = make_epilog("du my-run", "du my-run --json", codes=RUN_CODES)


@click.command("du", epilog=EPILOG)
@click.argument("run", type=RUN)
@json_option
def command(run: str, as_json: bool) -> None:
    """Show how much disk space the files of RUN use."""
    from primerl_hpc.launch.storage.usage import format_bytes, measure_run
    from primerl_hpc.run.registry import find_run

    found = find_run(run)
    usage = measure_run(found)
    if as_json:
        print_json({"run": found.root.name, "run_dir": str(found.root), "parts": usage.as_json()})
        return
    parts = sorted(usage.parts.items(), key=lambda item: -item[1].size_bytes)
    for name, part in (*parts, ("total", usage.total)):
        click.echo(f"{name:<12} {format_bytes(part.size_bytes):>11} {part.num_files:>8,} files")
