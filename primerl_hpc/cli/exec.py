"""``primerl-hpc exec``: run a command on nodes of a running run."""

from __future__ import annotations

import subprocess

import click

from primerl_hpc.cli.options import RUN_CODES, json_option, make_epilog, node_option, print_json, role_option
from primerl_hpc.cli.values import RUN
from primerl_hpc.common.errors import ExitCode

EPILOG = make_epilog(
    "exec my-run --role inference-0 -- nvidia-smi",
    "exec my-run --node gpu-b -- df -h /tmp",
    codes=(*RUN_CODES, ExitCode.UNAVAILABLE),
    more="Otherwise the exit code of CMD; on several nodes, the largest one.",
)


@click.command("exec", epilog=EPILOG, context_settings={"ignore_unknown_options": True})
@click.argument("run", type=RUN)
@node_option
@role_option
@click.argument("cmd", nargs=-1, required=True, type=click.UNPROCESSED)
@json_option
def command(run: str, node: str | None, role: str | None, cmd: tuple[str, ...], as_json: bool) -> int:
    """Run CMD in the job of RUN, on its first node, on --node, or on all nodes of --role.

    Under SLURM this starts a step (srun --overlap) that shares the resources of the run's processes.
    """
    from primerl_hpc.observe.inside.steps import find_places, step_command, step_environ
    from primerl_hpc.run.registry import find_run

    code, results = 0, []
    for place in find_places(find_run(run), node=node, role=role):
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
