"""``primerl-hpc status``"""

from __future__ import annotations

import click

from primerl_hpc.cli.options import json_option, print_json, run_argument


@click.command(
    "status", epilog="Examples:  primerl-hpc status\n\n  primerl-hpc status reverse-text-tiny-001 --watch"
)
@run_argument
@click.option("--watch", "-w", "is_watching", is_flag=True, help="Redraw until ^C.")
@click.option("--interval", default=2.0, show_default=True, help="Seconds between redraws.")
@json_option
def command(run: str | None, is_watching: bool, interval: float, as_json: bool) -> None:
    """All runs on one screen, or RUN (a name, its beginning, or a path) in depth."""
    from primerl_hpc.common.registry import find_run, list_runs
    from primerl_hpc.common.rundir import RunDir
    from primerl_hpc.observe.slurm import JobWatcher
    from primerl_hpc.observe.snapshot import Snapshot, take_snapshot
    from primerl_hpc.observe.status import depth, table, watch

    jobs = JobWatcher()

    def look(runs: list[RunDir]) -> list[Snapshot]:
        facts = jobs.facts_of(runs)
        return [take_snapshot(each, facts) for each in runs]

    if run is not None:
        found = find_run(run)
        if as_json:
            print_json(look([found])[0].as_json())
            return
        draw = lambda: depth(look([found])[0])  # noqa: E731
    else:
        snapshots = lambda: look([RunDir(each.path) for each in list_runs()])  # noqa: E731
        if as_json:
            print_json([each.as_json() for each in snapshots()])
            return
        draw = lambda: table(snapshots())  # noqa: E731
    if is_watching:
        watch(draw, interval)
    else:
        click.echo(draw())
