"""``primerl-hpc role NAME``: run one process of a prepared run in this terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from primerl_hpc.cli.aliases import ROLES
from primerl_hpc.cli.options import index_option, make_epilog, phase_option
from primerl_hpc.cli.values import RUN
from primerl_hpc.common.errors import ExitCode

if TYPE_CHECKING:
    from primerl_hpc.run.rundir import RunDir

EPILOG = make_epilog(
    "submit my.yaml -p local --dry-run --run-dir /scratch/my-run",
    "role trainer /scratch/my-run",
    "role env-server /scratch/my-run --index 1",
    codes=(ExitCode.DATA, ExitCode.NOT_FOUND, ExitCode.OCCUPIED, ExitCode.CONFIG),
    more="Otherwise, the exit code is that of the process.",
)


@click.command("role", epilog=EPILOG)
@click.argument("name", type=click.Choice(ROLES), metavar="NAME")
@click.argument("run", type=RUN)
@index_option
@phase_option
def command(name: str, run: str, index: int, phase: str | None) -> None:
    """Run a process of the role NAME in this terminal, with the prepared directory RUN.

    \b
    inference, prefill    one vLLM engine; one that only processes prompts
    teacher, judge        one engine of the teacher or of the judge
    router                the router in front of the engines
    env-server            one verifiers environment server
    orchestrator          turns rollouts into batches
    trainer, sft          the trainer (torchrun starts its ranks)
    evaluator, tracker    evaluations; metrics for one experiment tracker
    """
    from primerl_hpc.common import env
    from primerl_hpc.common.files import read_json_or_none
    from primerl_hpc.common.names import Role, process_name
    from primerl_hpc.launch.queue import environ_here
    from primerl_hpc.plan.plan import load_plan, with_interpreter
    from primerl_hpc.run.access.keys import run_keys
    from primerl_hpc.run.access.ownership import check_own
    from primerl_hpc.run.registry import find_run
    from primerl_hpc.runtime.step import Launch
    from primerl_hpc.runtime.steps.guard import drop_variables
    from primerl_hpc.runtime.steps.local import visible_accelerators

    found, role = find_run(run), Role(name.replace("-", "_"))
    check_own(found)
    _use_code_of(found, ["role", name, run, "--index", str(index), *(["--phase", phase] if phase else [])])
    plan = with_interpreter(load_plan(found), sys.executable)
    chosen = plan.phase_of(role, phase)
    process = chosen.process(process_name(role, index))
    attempt = int((read_json_or_none(found.state) or {}).get("attempt", 1))
    launch = Launch(process, found, chosen.name, attempt, 0)
    run_keys(found, attempt)
    root = str(Path(__file__).resolve().parents[2])
    visible = visible_accelerators(launch, has_gpus=plan.accelerator == "gpu")
    environment = {**environ_here(plan.passed_variables), **visible, **launch.environment}
    environment[env.PYTHONPATH] = env.join_pythonpath(root, environment.get(env.PYTHONPATH))
    drop_variables(environment)
    click.echo(f"{process.name}: {' '.join(process.argv)}", err=True)
    os.execvpe(process.argv[0], list(process.argv), environment)


def _use_code_of(run: RunDir, words: list[str]) -> None:
    """Start ``primerl-hpc WORDS`` with the run's own copy of the code, if it has one and this is another."""
    from primerl_hpc.common import env
    from primerl_hpc.offline.code.keep import code_root, has_copy

    root = code_root(run) if has_copy(run) else None
    if root is None or Path(root).resolve() == Path(__file__).resolve().parents[2]:
        return
    path = env.join_pythonpath(root, os.environ.get(env.PYTHONPATH))
    environment = {**os.environ, env.PYTHONPATH: path, "PYTHONSAFEPATH": "1"}
    os.execve(sys.executable, [sys.executable, "-m", "primerl_hpc", *words], environment)
