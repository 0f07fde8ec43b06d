"""``primerl-hpc inference|router|prefill|teacher|judge|env-server|orchestrator|trainer|sft|evaluator``: one part of a run by hand.

``inference`` takes a recipe too, which it submits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from primerl_hpc.cli.bench import BENCHED, bench_options, run_bench
from primerl_hpc.cli.options import json_option, load_both
from primerl_hpc.cli.submit import submit, submit_options

_ABOUT = {
    "inference": "one vLLM engine, with its control routes",
    "router": "the router in front of the engines",
    "prefill": "one engine that reads prompts for the others",
    "teacher": "one engine of the teacher",
    "judge": "one engine of the judge",
    "env-server": "one verifiers environment server",
    "orchestrator": "the orchestrator: rollouts, advantages, batches",
    "trainer": "the RL trainer (torchrun starts its ranks)",
    "sft": "the SFT trainer (torchrun starts its ranks)",
    "evaluator": "the evaluator",
    "tracker": "the tracker, which sends metrics to Weights & Biases",
}


SERVED = "inference"
"""The part that is also a job of its own: a recipe in place of the run is submitted."""
_OF_A_PART = ("index", "phase")


def make_command(name: str) -> click.Command:
    epilog = f"""\b
Example:
  primerl-hpc submit my.yaml -p local --dry-run --run-dir /scratch/my-run
  primerl-hpc {name} /scratch/my-run
"""
    about = f"Run {_ABOUT[name]}, in this terminal, against the prepared RUN directory."
    more: Callable[[Any], Any] = lambda function: function  # noqa: E731
    if name in BENCHED:
        epilog += f"  primerl-hpc {name} --bench my.yaml -p local --lengths 512-2048\n"
        about += "\n\nWith --bench measure it instead, on made-up data; RUN may then be a recipe."
        more = bench_options
    if name == SERVED:
        epilog += f"  primerl-hpc {name} my.yaml -p h100x64 --follow\n"
        about += (
            "\n\nOr submit a recipe of kind inference in place of RUN: a job of its engines behind a router, whose "
            "address --follow and status print."
        )
        more = lambda function: submit_options(json_option(function))  # noqa: E731

    @click.command(name, epilog=epilog, help=about)
    @click.argument("run", metavar="RUN|RECIPE" if name == SERVED else "RUN")
    @click.option(
        "--index",
        type=click.IntRange(min=0),
        default=0,
        metavar="I",
        show_default=True,
        help="Which one of the role.",
    )
    @click.option("--phase", help="Phase of the plan. [default: the one that has this role]")
    @more
    def command(run: str, index: int, phase: str | None, **how: Any) -> int | None:
        if how.pop("is_bench", False):
            run_bench(name, run, index, phase, **how)
            return None
        if name == SERVED and _is_recipe(run):
            _refuse(_OF_A_PART, "is of one part of a run, and this is a recipe")
            return _submit(run, **how)
        others = {each.name for each in click.get_current_context().command.params} - {"run", *_OF_A_PART}
        _refuse(others, "is for a recipe, and this is a run" if name == SERVED else "belongs to --bench")
        _run_role(name.replace("-", "_"), run, index, phase)
        return None

    return command


def _refuse(names: Collection[str | None], why: str) -> None:
    """Raises UsageError when one of these options was typed: it would say nothing."""
    context = click.get_current_context()
    for option in context.command.params:
        typed = option.name in names and context.get_parameter_source(str(option.name))
        if typed == ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option.opts[0]} {why}")


def _is_recipe(word: str) -> bool:
    from primerl_hpc.launch.evaluate import find_source

    return isinstance(find_source(word), Path)


def _submit(recipe: str, profile_name: str | None, overrides: tuple[str, ...], **how: Any) -> int:
    from primerl_hpc.common.errors import ConfigError
    from primerl_hpc.common.names import Kind

    loaded, profile = load_both(recipe, profile_name, overrides)
    if loaded.recipe.kind != Kind.INFERENCE:
        raise ConfigError(
            f"a recipe of kind {loaded.recipe.kind} has more than engines",
            place=recipe,
            mend="primerl-hpc submit runs all of it; engines alone are a recipe of kind inference",
        )
    return submit(loaded, profile, **how)


def _run_role(role: str, word: str, index: int, phase_name: str | None) -> None:
    """Replace this process by the role's, with the environment the supervisor would give it."""
    from primerl_hpc.common.files import read_json_or_none
    from primerl_hpc.common.names import Role, process_name
    from primerl_hpc.common.registry import find_run
    from primerl_hpc.common.rundir import ensure_api_key
    from primerl_hpc.plan.types import load_plan
    from primerl_hpc.runtime.local_step import visible_accelerators
    from primerl_hpc.runtime.steps import Launch

    run = find_run(word)
    plan = load_plan(run)
    phase = plan.phase_of(Role(role), phase_name)
    process = phase.process(process_name(Role(role), index))
    attempt = int((read_json_or_none(run.state) or {}).get("attempt", 1))
    launch = Launch(process, run, phase.name, attempt, 0)
    ensure_api_key(run)
    root = str(Path(__file__).resolve().parents[2])
    visible = visible_accelerators(launch, has_gpus=plan.accelerator == "gpu")
    environment = {**os.environ, **visible, **launch.environment}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    click.echo(f"{process.name}: {' '.join(process.argv)}", err=True)
    os.execvpe(process.argv[0], list(process.argv), environment)
