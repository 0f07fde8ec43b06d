"""``primerl-hpc shell``: an interactive shell on a node of a running run."""

from __future__ import annotations

import shlex
import subprocess
import sys

import click

from primerl_hpc.cli.options import RUN_CODES, json_option, make_epilog, node_option, print_json, role_option
from primerl_hpc.cli.values import RUN
from primerl_hpc.common.errors import ExitCode

EPILOG = make_epilog(
    "shell my-run",
    "shell my-run --role trainer --node gpu-b",
    codes=(*RUN_CODES, ExitCode.UNAVAILABLE),
    more="Otherwise the exit code of the shell.",
)


@click.command("shell", epilog=EPILOG)
@click.argument("run", type=RUN)
@node_option
@role_option
@click.option("--shell", "program", default="bash", show_default=True, help="The program to start.")
@json_option
def command(run: str, node: str | None, role: str | None, program: str, as_json: bool) -> int:
    """Open a shell in the job of RUN, on its first node, on --node, or on the first node of --role.

    Under SLURM this starts a step (srun --overlap --pty). --json prints its command line and starts nothing.
    """
    from dataclasses import replace

    from primerl_hpc.observe.inside.steps import find_places, step_command, step_environ
    from primerl_hpc.run.registry import find_run

    first = find_places(find_run(run), node=node, role=role)[0]
    place = replace(first, hosts=first.hosts[:1])
    words = step_command(place, [program], name="shell", is_terminal=True)
    if as_json:
        print_json({"run": run, "job": place.job_id, "node": place.hosts[0], "command": words})
        return ExitCode.DONE
    if not sys.stdin.isatty():
        raise click.UsageError(
            f"this is not a terminal; run one command with: primerl-hpc exec {shlex.quote(run)}"
        )
    return subprocess.run(words, env=step_environ(), check=False).returncode
