"""``primerl-hpc exec``: run a command or an interactive shell on nodes of a running run."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from primerl_hpc.cli.options import RUN_CODES, json_option, make_epilog, print_json
from primerl_hpc.cli.values import PROCESS, RUN
from primerl_hpc.common.errors import ExitCode

if TYPE_CHECKING:
    from primerl_hpc.observe.inside.steps import Place

EPILOG = make_epilog(
    "exec my-run --role inference-0 -- nvidia-smi",
    "exec my-run --node gpu-b -- df -h /tmp",
    "exec my-run --role trainer        opens a shell",
    codes=(*RUN_CODES, ExitCode.UNAVAILABLE),
    more="Otherwise the exit code of CMD; on several nodes, the largest one.",
)


@click.command("exec", epilog=EPILOG, context_settings={"ignore_unknown_options": True})
@click.argument("run", type=RUN)
@click.option("--node", metavar="HOST", help="Use this node of the run.")
@click.option(
    "--role",
    type=PROCESS,
    metavar="ROLE",
    help="Use the nodes of this role (trainer) or process (inference-0).",
)
@click.option(
    "--shell", "program", default="bash", show_default=True, help="Without CMD: start this program."
)
@click.argument("cmd", nargs=-1, type=click.UNPROCESSED)
@json_option
def command(
    run: str, node: str | None, role: str | None, program: str, cmd: tuple[str, ...], as_json: bool
) -> int:
    """Run CMD in the job of RUN, on its first node, on --node, or on all nodes of --role.

    Without CMD, open a shell on the first of these nodes; with --json, only print its command line. Under SLURM this
    starts a step (srun --overlap) that shares the resources of the run's processes.
    """
    from primerl_hpc.observe.inside.steps import find_places
    from primerl_hpc.run.registry import find_run

    places = find_places(find_run(run), node=node, role=role)
    if cmd:
        return _run_command(run, places, cmd, as_json)
    return _open_shell(run, replace(places[0], hosts=places[0].hosts[:1]), program, as_json)


def _run_command(run: str, places: list[Place], cmd: tuple[str, ...], as_json: bool) -> int:
    from primerl_hpc.observe.inside.steps import step_command, step_environ

    code, results = 0, []
    for place in places:
        words = step_command(place, cmd, name="exec")
        try:
            done = subprocess.run(words, env=step_environ(), check=False, capture_output=as_json, text=True)
        except OSError as error:
            raise click.ClickException(f"{words[0]}: {error.strerror}") from None
        status = done.returncode if done.returncode >= 0 else 128 - done.returncode
        code = max(code, status)
        where = {"job": place.job_id, "nodes": list(place.hosts)}
        results.append({**where, "exit_code": status, "stdout": done.stdout, "stderr": done.stderr})
    if as_json:
        print_json({"run": run, "command": list(cmd), "steps": results})
    return code


def _open_shell(run: str, place: Place, program: str, as_json: bool) -> int:
    from primerl_hpc.observe.inside.steps import step_command, step_environ

    words = step_command(place, [program], name="shell", is_terminal=True)
    if as_json:
        print_json({"run": run, "job": place.job_id, "node": place.hosts[0], "command": words})
        return ExitCode.DONE
    if not sys.stdin.isatty():
        raise click.UsageError(
            f"this is not a terminal; name one command: primerl-hpc exec {shlex.quote(run)} -- CMD"
        )
    return subprocess.run(words, env=step_environ(), check=False).returncode
