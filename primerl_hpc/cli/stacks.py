"""``primerl-hpc stacks``: what every process of a running run does at this moment."""

from __future__ import annotations

import click

from primerl_hpc.cli.options import RUN_CODES, json_option, make_epilog, print_json
from primerl_hpc.cli.values import PROCESS, RUN
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.safety.terminal import plain

EPILOG = make_epilog(
    "stacks my-run",
    "stacks my-run --process trainer-0 > stacks.txt",
    codes=(*RUN_CODES, ExitCode.UNAVAILABLE),
    more="1 also means that a node did not respond.",
)


@click.command("stacks", epilog=EPILOG)
@click.argument("run", type=RUN)
@click.option(
    "--process",
    "name",
    type=PROCESS,
    metavar="NAME",
    help="Show only this process of a role, e.g. trainer-0.",
)
@json_option
def command(run: str, name: str | None, as_json: bool) -> int:
    """Print the Python stacks of every process of RUN, from all of its nodes, within 15 s.

    The run continues meanwhile: no process is stopped. Stacks come from py-spy (pip install py-spy). Without it, they
    are written to the logs of the processes. Processes that are blocked in the kernel are shown with the kernel
    function and the file.
    """
    from primerl_hpc.observe.inside.stacks import collect_stacks
    from primerl_hpc.run.registry import find_run

    report = collect_stacks(find_run(run))
    shown = [process for process in report.processes if name in (None, process.process)]
    if as_json:
        print_json({**report.as_json(), "processes": [vars(process) for process in shown]})
    else:
        for process in sorted(shown, key=lambda process: (process.process, process.node, process.pid)):
            title = f"{process.process} on {process.node}, process {process.pid} ({process.state}): "
            click.secho(f"\n{title}{process.command}", bold=True)
            for text in (process.blocked_sentence if process.is_blocked else "", process.stack, process.note):
                if text:
                    click.echo(plain(text))
    for problem in report.problems:
        click.echo(f"warning: {problem}", err=True)
    if name is not None and not shown:
        raise click.UsageError(f"no process of '{name}' was found")
    return ExitCode.FAILED if report.problems else ExitCode.DONE
